"""The order in which a native update pauses, loads and goes on; and that nothing torn is ever trusted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol import Instruction, InstructionKind
from deployments.replica.follower import Rejected
from deployments.replica.native_member import NativeMember
from deployments.weights.wire.chunk_layout import describe
from tests.tiny_models import tiny_llama


class RecordingEngine:
    """Stands where an Engine does, and writes down what it is told."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.version, self.world_size, self.paused_by_user, self.weights_asleep = 4, 1, False, False
        core = SimpleNamespace(
            pause_scheduler_async=self._core("pause"), set_weight_version_async=self._core("version")
        )
        self.llm = SimpleNamespace(engine_core=core, reset_prefix_cache=self._core("reset prefix cache"))
        self.fails = ""

    def _core(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> None:
            self.did.append(" ".join([name, *map(str, args), *map(str, options.values())]))

        return call

    async def workers(self, method: str, **arguments: Any) -> list[Any]:
        self.did.append(method)
        if method == self.fails:
            raise RuntimeError("the peer is gone")
        return ["aa"] if method == "native_digest" else [None]

    async def release(self) -> None:
        self.did.append("release")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_llama(1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def payload(*, without: str = "") -> dict[str, Any]:
    tensors = [(n, p.dtype, tuple(p.shape)) for n, p in tiny_llama(1).named_parameters() if n != without]
    return describe(tensors)


async def tell(member: NativeMember, kind: InstructionKind, **args: Any) -> Any:
    return await member.execute(Instruction(seq=1, kind=kind, args={"round_id": 9, **args}, deadline_s=5))


async def begun(
    model: Path, *, one_payload: bool = True, kv_cache: str = "recompute"
) -> tuple[NativeMember, RecordingEngine]:
    engine = RecordingEngine()
    member = NativeMember(engine, str(model), one_payload=one_payload)  # type: ignore[arg-type]
    await tell(member, InstructionKind.BEGIN, keep=None, kv_cache=kv_cache, in_flight="keep")
    return member, engine


COMMIT = {"version": 5, "label": None, "in_flight": "keep"}


@pytest.mark.parametrize(("hold", "last"), [(True, []), (False, ["release"])])
async def test_a_round_pauses_with_the_first_byte_and_resumes_with_the_commit(
    model: Path, hold: bool, last: list[str]
) -> None:
    member, engine = await begun(model)
    assert engine.did == [], "nothing stops before a byte has come"
    await tell(member, InstructionKind.RECEIVE, payload=payload())
    assert member.torn and member.staged_round == 9
    value = await tell(member, InstructionKind.VERIFY, manifest=None)
    size = sum(p.numel() * p.itemsize for p in tiny_llama(1).parameters())
    assert (value["digest"], value["bytes"]) == ("aa", size)
    await tell(member, InstructionKind.COMMIT, hold=hold, kv_cache="recompute", **COMMIT)
    assert not member.torn and member.version == 5 and member.staged_round is None
    assert engine.did == [
        *("pause keep True", "start_weight_update", "native_update"),
        *("finish_weight_update", "native_digest", "version 5", *last),
    ]


async def test_kept_caches_are_not_cleared_but_their_prefixes_are(model: Path) -> None:
    member, engine = await begun(model, kv_cache="keep")
    await tell(member, InstructionKind.RECEIVE, payload=payload())
    await tell(member, InstructionKind.VERIFY, manifest=None)
    await tell(member, InstructionKind.COMMIT, hold=False, kv_cache="keep", **COMMIT)
    assert engine.did[0] == "pause keep False" and engine.did[-2:] == ["reset prefix cache", "release"]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (payload(without="model.norm.weight"), "'model.norm.weight' is missing"),
        (payload() | {"names": ["a"]}, "one entry a tensor"),
        ({"segment": "x"}, "expected names, dtype_names and shapes"),
    ],
)
async def test_what_does_not_fit_is_rejected_before_the_first_byte(
    model: Path, sent: dict[str, Any], words: str
) -> None:
    member, engine = await begun(model)
    with pytest.raises(Rejected, match=words):
        await tell(member, InstructionKind.RECEIVE, payload=sent)
    assert engine.did == [] and not member.torn
    await tell(member, InstructionKind.DROP)


async def test_a_tensor_that_never_came_is_found_at_the_end_and_breaks_the_replica(model: Path) -> None:
    member, _ = await begun(model, one_payload=False)
    await tell(member, InstructionKind.RECEIVE, payload=payload(without="model.norm.weight"))
    with pytest.raises(RuntimeError, match=r"'model\.norm\.weight' is missing"):
        await tell(member, InstructionKind.VERIFY, manifest=None)
    assert member.torn


async def test_an_empty_round_is_rejected_and_changes_nothing(model: Path) -> None:
    member, engine = await begun(model, one_payload=False)
    with pytest.raises(Rejected, match="is missing"):
        await tell(member, InstructionKind.VERIFY, manifest=None)
    assert engine.did == []


async def test_after_the_first_byte_there_is_no_way_back(model: Path) -> None:
    member, engine = await begun(model)
    engine.fails = "native_update"
    with pytest.raises(RuntimeError, match="the peer is gone"):
        await tell(member, InstructionKind.RECEIVE, payload=payload())
    with pytest.raises(RuntimeError, match="a mixture of two versions"):
        await tell(member, InstructionKind.DROP)
