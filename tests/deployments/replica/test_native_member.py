import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.protocol import poll
from deployments.protocol.engine_state import InFlight, Resume
from deployments.protocol.errors import PayloadRejected
from deployments.replica.engine_core import RESET_CACHES
from deployments.replica.native_member import NativeMember
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.server_arguments import EngineSpec
from deployments.weights.store.checkpoint_files import Checkpoint, stated
from deployments.weights.wire.chunk_layout import describe
from tests.deployments.replica.fake_vllm import FakeLlm
from tests.fake_hub import FakeHub
from tests.tiny_models import tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_llama(1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def payload(*, without: str = "") -> dict[str, Any]:
    tensors = [(n, p.dtype, tuple(p.shape)) for n, p in tiny_llama(1).named_parameters() if n != without]
    return describe(tensors)


def receive(sent: dict[str, Any]) -> poll.Receive:
    return poll.Receive(round_id=9, payload=sent)


VERIFY, DROP = poll.Verify(round_id=9), poll.Drop(round_id=9)


def commit(*, hold: bool = False, kv_cache: poll.KvCache = poll.KvCache.RECOMPUTE) -> poll.Commit:
    return poll.Commit(round_id=9, version=5, hold=hold, kv_cache=kv_cache, in_flight=InFlight.KEEP)


def member_of(
    model: Path | str, *, one_payload: bool = True, **arguments: str
) -> tuple[NativeMember, FakeLlm]:
    llm = FakeLlm()
    engine = ReplicaEngine(llm, FastAPI(), version=4)  # type: ignore[arg-type]
    spec = EngineSpec(
        model=str(model), served_model_name="m", backend="nccl", staging="none", arguments=arguments
    )
    return NativeMember(engine, spec, one_payload=one_payload), llm


@pytest.mark.parametrize(("hold", "last"), [(True, []), (False, ["resume"])])
async def test_native_round_pauses_at_the_first_payload_and_resumes_at_the_commit(
    model: Path, hold: bool, last: list[str]
) -> None:
    member, llm = member_of(model)
    await member.execute(receive(payload()))
    assert member.partially_updated and member.staged_round == 9
    await member.execute(poll.RunOperation(operation=Resume()))
    assert not llm.begins, "it would generate with a mixture of two versions"
    staged = await member.execute(VERIFY)
    assert isinstance(staged, poll.Staged)
    checks = [check.value for check in staged.checks]
    assert checks == ["names", "shapes", "dtypes", "complete"], "vLLM's publishers state no digests"
    size = sum(p.numel() * p.itemsize for p in tiny_llama(1).parameters())
    assert (staged.digest, staged.size_bytes) == ("aa", size)
    await member.execute(commit(hold=hold))
    assert not member.partially_updated and member.version == 5 and member.staged_round is None
    assert llm.begins is not hold
    assert llm.did == [
        *("pause keep", "start_weight_update", "native_update"),
        *("finish_weight_update", "native_digest", f"{RESET_CACHES} True", "version 5", *last),
    ]


async def test_kept_requests_are_not_recomputed(model: Path) -> None:
    member, llm = member_of(model)
    await member.execute(receive(payload()))
    await member.execute(VERIFY)
    await member.execute(commit(kv_cache=poll.KvCache.KEEP))
    assert llm.did[-3:] == [f"{RESET_CACHES} False", "version 5", "resume"]


NOTHING_NEW = {
    "names": [],
    "dtype_names": [],
    "shapes": [],
}  # vLLM 0.33's trainer: the tensors of the last round


async def test_tensors_that_are_not_described_again_are_those_of_the_last_round(model: Path) -> None:
    member, llm = member_of(model)
    for sent in (payload(), NOTHING_NEW):
        await member.execute(receive(sent))
        await member.execute(VERIFY)
        await member.execute(replace(commit(), version=member.version + 1))
    assert [each["payload"] for each in llm.named("native_update")] == [payload(), payload()]
    await member.execute(poll.Connect(init_info={}))
    with pytest.raises(PayloadRejected, match="expected names, dtype_names and shapes"):
        await member.execute(receive(NOTHING_NEW))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (payload(without="model.norm.weight"), "'model.norm.weight' is missing"),
        (payload() | {"names": ["a"]}, "one entry per tensor"),
        ({"segment": "x"}, "expected names, dtype_names and shapes"),
    ],
)
async def test_payload_of_another_model_is_rejected_before_the_pause(
    model: Path, sent: dict[str, Any], words: str
) -> None:
    member, llm = member_of(model)
    with pytest.raises(PayloadRejected, match=words):
        await member.execute(receive(sent))
    assert llm.did == [] and not member.partially_updated
    await member.execute(DROP)


async def test_payload_that_does_not_fit_a_hub_model_is_rejected(model: Path, hub: FakeHub) -> None:
    hub.repositories["org/tiny"] = model
    member, llm = member_of("org/tiny", revision="v2", download_dir="/large")
    ((_, options),) = hub.asked
    assert (options["revision"], options["cache_dir"], options["local_files_only"]) == ("v2", "/large", True)
    with pytest.raises(PayloadRejected, match=r"'model\.norm\.weight' is missing"):
        await member.execute(receive(payload(without="model.norm.weight")))
    assert llm.did == []


async def test_missing_tensor_is_found_by_verify_and_fails_the_replica(model: Path) -> None:
    member, _ = member_of(model, one_payload=False)
    await member.execute(receive(payload(without="model.norm.weight")))
    with pytest.raises(RuntimeError, match=r"'model\.norm\.weight' is missing"):
        await member.execute(VERIFY)
    assert member.partially_updated


async def test_repeated_tensor_is_never_committed(model: Path) -> None:
    """Of two publishers: what is loaded then is a mixture of both."""
    member, llm = member_of(model, one_payload=False)
    await member.execute(receive(payload()))
    with pytest.raises(RuntimeError, match=r"'lm_head\.weight' came twice in this round"):
        await member.execute(receive(payload()))
    assert member.partially_updated and llm.did.count("native_update") == 1


async def test_native_drop_after_the_first_payload_fails_the_replica(model: Path) -> None:
    member, llm = member_of(model)
    llm.fails["native_update"] = RuntimeError("the peer is gone")
    with pytest.raises(RuntimeError, match="the peer is gone"):
        await member.execute(receive(payload()))
    with pytest.raises(RuntimeError, match="a mixture of two versions"):
        await member.execute(DROP)


@pytest.mark.parametrize("held_before", [False, True])
async def test_interrupted_pause_is_undone_by_the_drop(
    model: Path, held_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold of an earlier commit stays: its release is on the way."""
    member, llm = member_of(model)
    pause = llm.pause_scheduler_async

    async def hangs(**options: Any) -> None:
        await pause(**options)
        await asyncio.Event().wait()

    monkeypatch.setattr(llm, "pause_scheduler_async", hangs)
    member._engine.held = held_before
    receiving = asyncio.create_task(member.execute(receive(payload())))
    while not llm.did:
        await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving  # whether the engine answers or not
    await member.execute(DROP)
    assert llm.begins is not held_before and not member.partially_updated
    assert llm.did == ["pause keep", *([] if held_before else ["resume"])]


# -- weights that come from files ------------------------------------------------------------------


def parts_of(directory: Path, seed: int = 2) -> list[poll.FilePart]:
    tiny_llama(seed).save_pretrained(directory)
    checkpoint = Checkpoint.open(str(directory), [directory], 1 << 18)
    checkpoint.close()
    return [stated(part) for part in checkpoint.parts]


def read(part: poll.FilePart) -> poll.Receive:
    return poll.Receive(round_id=9, payload=part)


async def test_directory_is_compared_while_generating_and_loaded_in_a_pause(
    model: Path, tmp_path: Path
) -> None:
    member, llm = member_of(model)
    parts = parts_of(tmp_path / "new")
    assert len(parts) > 1
    for part in parts:
        await member.execute(read(part))
    assert not member.partially_updated and llm.begins
    staged = await member.execute(VERIFY)
    assert isinstance(staged, poll.Staged) and poll.Check.DIGESTS not in staged.checks, (
        "vLLM's loader reads it once more"
    )
    assert staged.size_bytes == sum(part.size_bytes for part in parts)
    await member.execute(commit())
    assert not member.partially_updated and member.version == 5
    assert llm.did == [
        *["reload_refusal"] * len(parts),
        *("pause keep", "load_checkpoint", "native_digest"),
        *(f"{RESET_CACHES} True", "version 5", "resume"),
    ]
    assert llm.named("load_checkpoint") == [{"path": str(tmp_path / "new")}]


@pytest.mark.parametrize("spoil", ["changed", "gone", "half", "mistral"])
async def test_changed_directory_is_rejected_before_the_pause(
    model: Path, tmp_path: Path, spoil: str
) -> None:
    member, llm = member_of(model)
    parts = parts_of(tmp_path / "new")
    if spoil == "changed":
        tiny_llama(3).save_pretrained(tmp_path / "new")
    elif spoil == "gone":
        (tmp_path / "new" / "model.safetensors").unlink()
    elif spoil == "mistral":
        (tmp_path / "new" / "consolidated.safetensors").write_bytes(b"vLLM prefers it to what was compared")
    with pytest.raises(PayloadRejected, match=r"arrived with|No such file|is missing|vLLM would load"):
        await member.execute(read(parts[0]))
        await member.execute(VERIFY)
    assert not member.partially_updated and llm.begins
    await member.execute(DROP)
    for part in parts_of(tmp_path / "other"):
        await member.execute(poll.Receive(round_id=10, payload=part))
    await member.execute(poll.Verify(round_id=10))
