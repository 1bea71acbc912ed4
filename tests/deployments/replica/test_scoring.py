"""The replica's half of the proof of policy."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.ledger.proof import deviations
from deployments.protocol.adapters import Adapter
from deployments.protocol.engine_state import InFlight, Pause
from deployments.protocol.poll import RunOperation, Scores
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.weights.wire.proof_sequences import LONG, SHORT, proof_sequences
from tests.deployments.replica.fake_vllm import FakeEngine, FakeLlm, staged_member
from tests.deployments.replica.faulty_engine import scores_with_faults
from tests.forked import call
from tests.waiting import reached

INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def test_both_ends_have_the_same_sequences() -> None:
    sequences = proof_sequences(3, 1000)
    assert sequences == proof_sequences(32, 1000)[:3]
    assert [len(each.prompt) for each in sequences] == [LONG, SHORT, SHORT]
    ids = {token for each in sequences for token in (*each.prompt, each.token)}
    assert min(ids) >= 250 and max(ids) < 750, "special tokens are at the ends"
    assert sequences != proof_sequences(3, 2000)


class ScoringLlm(FakeLlm):
    """Scores each token with a tenth of its id, as this version."""

    def __init__(self) -> None:
        super().__init__()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
        self.output_processor.counted = []
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            setattr(self.output_processor, name, lambda state: self.output_processor.counted.append(state))
        self.version = 3
        self.asked: list[str] = []
        self.adapters: list[str | None] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked.append(request_id)
        adapter = options["lora_request"]
        self.adapters.append(adapter and adapter.lora_name)
        await self.answers.wait()
        (token,) = params.logprob_token_ids
        span = SimpleNamespace(version=str(self.version), start=0, end=1)
        logprobs = [{token: SimpleNamespace(logprob=-token / 10)}]
        yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs, weight_versions=[span])])


def engine_of(llm: FakeLlm) -> ReplicaEngine:
    return FakeEngine(
        llm, SimpleNamespace(state=None, router=SimpleNamespace(lifespan_context=lambda app: None)), 3
    )  # type: ignore[arg-type]


EXPECTED = Scores(version=3, values=tuple(-each.token / 10 for each in proof_sequences(2, 1000)))


async def test_a_version_is_scored_once_and_reported_until_it_is_answered() -> None:
    llm = ScoringLlm()
    proof = Proof(engine_of(llm), 2)
    proof.begin_if_due()
    await reached(lambda: proof.scores is not None)
    assert proof.report() == EXPECTED
    assert proof.report() == EXPECTED, "the first report was lost"
    proof.on_reported()
    proof.begin_if_due()
    assert proof.report() is None
    assert len(llm.asked) == 2


async def test_each_live_adapter_is_scored_when_it_comes() -> None:
    llm = ScoringLlm()
    engine = engine_of(llm)
    proof = Proof(engine, 2)
    proof.begin_if_due()
    await reached(lambda: proof.scores is not None)
    held: list[Adapter] = []
    for number, name in enumerate(("math", "code"), 1):
        held.append(Adapter(adapter_id=number, name=name, version=5, path="/a", digest="d", size_bytes=1))
        engine.adapters._held = {each.adapter_id: each for each in held}
        await engine.adapters.make_live(held)
        proof.begin_if_due()
        await reached(lambda: proof.scores is not None and len(proof.scores.adapters) == len(held))
    assert proof.scores is not None and proof.scores.values == EXPECTED.values
    assert proof.scores.adapters == {"math@5": EXPECTED.values, "code@5": EXPECTED.values}
    assert llm.adapters == [None] * 2 + ["math@5"] * 2 + ["code@5"] * 2, "what is known is not asked again"


async def test_scores_that_no_report_has_had_are_kept() -> None:
    proof = Proof(engine_of(ScoringLlm()), 2)
    assert proof.report() is None
    proof.begin_if_due()
    await reached(lambda: proof.scores is not None)
    proof.on_reported()
    assert proof.report() == EXPECTED


async def test_nothing_is_scored_while_the_scheduler_is_paused() -> None:
    llm = ScoringLlm()
    member = staged_member(llm)
    member.proof = Proof(member._engine, 2)
    llm.answers.clear()
    member.proof.begin_if_due()
    await reached(lambda: bool(llm.asked))
    await member.execute(RunOperation(operation=Pause(mode=InFlight.KEEP)))
    llm.answers.set()
    await asyncio.sleep(0)
    assert member.proof.report() is None and len(llm.asked) == 1
    await member._engine.resume()
    member.proof.begin_if_due()
    await reached(lambda: member.proof.report() == EXPECTED)


async def test_an_answer_of_another_version_is_no_proof(caplog: pytest.LogCaptureFixture) -> None:
    llm = ScoringLlm()
    llm.version = 2
    proof = Proof(engine_of(llm), 2)
    proof.begin_if_due()
    await reached(lambda: "no proof of version 3" in caplog.text)
    proof.begin_if_due()
    assert proof.report() is None and len(llm.asked) == 1, "it is given up, not asked again and again"


@pytest.mark.long
@pytest.mark.serve
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_planted_faults_change_the_scores(kind: str, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found = call(scores_with_faults, tmp_path, kind, False, **INSECURE, **environment)
    assert not found["compiles"]
    check(found)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["dense", "experts", "mla", "fp8"])
def test_planted_faults_change_the_scores_on_a_gpu(kind: str, tmp_path: Path) -> None:
    check(call(scores_with_faults, tmp_path, kind, True, timeout_s=380.0, **INSECURE))


def check(found: dict[str, Any]) -> None:
    assert found.pop("counted") == 0, "requests of users only"
    del found["compiles"]
    good = found.pop("first").values
    worst = {name: deviations({name: each.values}, good)[name].worst for name, each in found.items()}
    print(worst)
    assert worst["again"] < 1e-4 and worst["mended"] < 1e-4
    assert worst["wrong scale"] > 1e-2 and worst["other layer"] > 1e-2
    cached = deviations({"stale": found["stale cache"].values}, found["other layer"].values)["stale"]
    print("stale cache beside a fresh one", cached.worst)
    assert cached.worst > 1e-2, "a fresh cache would give the same scores"
    if "adapter" in found:
        assert worst["other adapter"] < 1e-4, "of the base"
        right, wrong = (found[name].adapters["math@1"] for name in ("adapter", "other adapter"))
        exchanged = deviations({"replica": wrong}, right)["replica"].worst
        print("another version's adapter", exchanged)
        assert exchanged > 1e-2
