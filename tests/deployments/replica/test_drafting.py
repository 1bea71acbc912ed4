"""An engine on the CPU with a draft model, which is off while too little of what it drafts is accepted."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from app.http.prometheus import load_of
from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import Commit, KvCache, Outcome
from deployments.protocol.responses import ReplicaLoad
from deployments.replica.engine_load import JUDGED, watch_load
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.server_arguments import EngineSpec, check_drafting
from deployments.vllm_versions import OLD
from deployments.weights.staging.staged_update import StagingState, from_wire, to_wire
from deployments.weights.store.checkpoint_files import Checkpoint, stated
from tests.deployments.weights.staging.drafted import save_policy, version
from tests.fleet.talk import ENVIRONMENT, Reference
from tests.forked import call
from tests.waiting import reached

DRAFTED = 3  # tokens of a step and request
PROMPTS = [[5, 6, 7 + number] for number in range(32)]
SHORT, LONG = 6, 30  # tokens
assert SHORT * len(PROMPTS) * DRAFTED < JUDGED < LONG * len(PROMPTS) * DRAFTED / 2


class Drafting:
    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine, self._asked = engine, 0
        watch_load(engine.llm, lambda: engine.version, 0.5, engine.stop_drafting)

    async def answers(self, length: int) -> list[list[int]]:
        """Greedy; the last one's schema cuts drafts short, and all of its tokens conform."""
        schema = StructuredOutputsParams(regex=f"[ab]{{{length}}}")
        schemas = [None] * len(PROMPTS) + [schema]
        asked = zip([*PROMPTS, PROMPTS[0]], schemas, strict=True)
        return await asyncio.gather(*(self._answer(prompt, length, schema) for prompt, schema in asked))

    async def _answer(
        self, prompt: list[int], length: int, schema: StructuredOutputsParams | None
    ) -> list[int]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=schema,
        )
        self._asked += 1
        request: Any = {"prompt_token_ids": prompt}
        (output,) = [each async for each in self._engine.llm.generate(request, sampling, f"r{self._asked}")]
        return list(output.outputs[0].token_ids)

    @property
    def load(self) -> ReplicaLoad:
        found = load_of(generate_latest(REGISTRY).decode())
        assert found is not None
        return found

    async def stage(self, directory: Path) -> None:
        checkpoint, workers = Checkpoint.open(str(directory), [directory.parent]), self._engine.workers
        for index, part in enumerate(checkpoint.parts):
            options = {"share": 1.0, "begins": index == 0, "retain_version": None}
            await workers("staging_read", part=to_wire(stated(part)), **options)
        checkpoint.close()
        (state,) = await workers("staging_verify")
        assert from_wire(StagingState, state).outcome is Outcome.DONE

    async def commit(self) -> None:
        await self._engine.commit(
            Commit(round_id=1, version=1, hold=False, kv_cache=KvCache.RECOMPUTE, in_flight=InFlight.KEEP)
        )


def drafting(directory: Path) -> dict[str, Any]:
    return asyncio.run(_drafting(directory))


async def _drafting(directory: Path) -> dict[str, Any]:
    a, b, unrelated = (save_policy(directory / name, seed) for seed, name in enumerate("abx"))
    drafts = {"method": "draft_model", "model": str(unrelated), "num_speculative_tokens": DRAFTED}
    spec = EngineSpec(
        model=str(a),
        served_model_name="tiny",
        backend="shm",
        staging="host",
        arguments={
            "dtype": "float32",
            "max_model_len": 128,
            "enforce_eager": True,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "speculative_config": drafts,
        },
    )
    engine = await ReplicaEngine.start(spec, version=0)
    try:
        it, found = Drafting(engine), {}
        found["on"] = await it.answers(SHORT), it.load
        found["is switched off"] = await it.answers(LONG), it.load
        found["off"] = await it.answers(SHORT), it.load
        await it.stage(version(directory / "both", b, b))
        running = asyncio.create_task(it.answers(LONG))
        begun = found["off"][1].generated_tokens + len(PROMPTS)
        await reached(lambda: it.load.generated_tokens > begun)
        await it.commit()
        found["meanwhile"] = await running, it.load
        found["on again"] = await it.answers(SHORT), it.load
        return found
    finally:
        await engine.stop()


@pytest.mark.serve
@pytest.mark.timeout(300)
def test_drafting_is_off_until_the_next_version_where_too_little_is_accepted(tmp_path: Path) -> None:
    found = call(drafting, tmp_path, **ENVIRONMENT)
    a, b = Reference(tmp_path / "a"), Reference(tmp_path / "b")
    loads = {step: load for step, (_, load) in found.items()}
    assert [step for step, load in loads.items() if load.drafting_off] == ["is switched off", "off"]
    assert loads["on"].accepted_tokens < 0.1 * loads["on"].drafted_tokens
    assert JUDGED <= loads["is switched off"].drafted_tokens < 2 * JUDGED
    assert loads["off"].drafted_tokens == loads["is switched off"].drafted_tokens
    assert 0 < loads["meanwhile"].drafted_tokens < loads["on again"].drafted_tokens
    assert loads["on again"].accepted_tokens > 0.9 * loads["on again"].drafted_tokens
    for policy, steps in ((a, ("on", "is switched off", "off")), (b, ("on again",))):
        for step in steps:
            *answers, constrained = found[step][0]
            assert [policy.continues(*each) for each in zip(PROMPTS, answers, strict=True)] == list(
                map(len, answers)
            )
            assert set(constrained) <= {66, 67}
    for prompt, answer in zip(PROMPTS, found["meanwhile"][0], strict=False):
        before = a.continues(prompt, answer)
        assert 0 < before < LONG and b.continues(prompt + answer[:before], answer[before:]) == LONG - before


@pytest.mark.skipif(not OLD or not current_platform.is_cpu(), reason="vLLM 0.33, and GPUs, compute it")
def test_recurrent_layers_whose_state_vllm_loses_are_refused() -> None:
    spec = EngineSpec(model="m", served_model_name="m", backend="shm", staging="host")
    bounded = replace(spec, min_draft_acceptance=0.1)
    for each, is_hybrid in ((spec, True), (bounded, False), (bounded, True)):
        config: Any = SimpleNamespace(model_config=SimpleNamespace(is_hybrid=is_hybrid))
        if each.min_draft_acceptance and is_hybrid:
            with pytest.raises(ValueError, match=r"expected 0 with recurrent layers .* got 0\.1"):
                check_drafting(each, config)
        else:
            check_drafting(each, config)
