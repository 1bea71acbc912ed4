"""The messages and the counters of the channel; CUDA memory itself is in the contract tests."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.controller.controller import json_only
from deployments.host.shared_memory import remove_segment
from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.ipc import IpcUpdateInfo, IpcWeightTransferEngine
from deployments.weights.transports.ipc_channel import (
    ABANDONED,
    PUBLISHED,
    TAKEN,
    Channel,
    IpcInitInfo,
    LocalChunk,
    MemoryHandle,
    OpenedTensors,
    PackedBuffers,
    Page,
    ResidentTensors,
    TensorLocation,
    check_location,
    create_page,
    open_page,
)
from deployments.weights.wire.chunk_layout import Entry, ReceivedChunk, describe, pack, packed_chunk
from tests.deployments.weights.transports.transport_fleet import worker_config, write_checkpoint


def handle(size_bytes: int = 4096) -> MemoryHandle:
    return MemoryHandle(
        memory="bWVtb3J5",
        size_bytes=size_bytes,
        offset_bytes=512,
        counter="Y291bnRlcg==",
        counter_offset=3,
        event="ZXZlbnQ=",
        sync=True,
    )


PACKED = Channel(page="page-1", memory=PackedBuffers(buffers=(handle(), handle())))
IN_PLACE = Channel(
    page="page-2",
    memory=ResidentTensors(
        storages=(handle(),), tensors=(TensorLocation(0, 256), TensorLocation(0, 0)), digests=handle(16)
    ),
)
CHANNELS = {"GPU-1": PACKED, "GPU-2": IN_PLACE}
ELSEWHERE = f"slipstream-{'0' * 32}-{'1' * 32}"


def init_info() -> IpcInitInfo:
    described = describe([("a", torch.bfloat16, (2, 3)), ("b", torch.float32, ())])
    return IpcInitInfo(channels=CHANNELS, rank_offset=1, world_size=3, chunk_bytes=1 << 20, **described)


def test_vllm_parses_the_init_info_that_the_trainer_sends() -> None:
    sent = init_info().to_wire()
    json_only(sent, "init_info")
    engine = object.__new__(IpcWeightTransferEngine)  # parsing needs no model
    assert engine.parse_init_info(json.loads(json.dumps(sent))) == init_info()
    with pytest.raises(ValueError, match="over the fleet's"):
        engine.parse_init_info({})


@pytest.mark.parametrize(
    ("gpu", "sources"), [("GPU-2", ["GPU-2"] * 3), ("GPU-3", ["GPU-2", "GPU-1", "GPU-2"])]
)
def test_worker_uses_the_channel_of_its_own_gpu_or_all_in_turn(gpu: str, sources: list[str]) -> None:
    assert [init_info().source_of(gpu, rank) for rank in (1, 2, 3)] == sources


def test_no_channel_and_a_channel_of_another_host_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^channels: expected that of one trainer rank at least, got none$"):
        replace(init_info(), channels={})
    expected = (
        rf"^the trainer rank on GPU GPU-1: segment '{ELSEWHERE}' does not exist on this host "
        r"\(transport 'ipc' connects the GPUs of one host\)$"
    )
    elsewhere = replace(init_info(), channels={"GPU-1": Channel(page=ELSEWHERE, memory=PACKED.memory)})
    with pytest.raises(ValueError, match=expected):
        elsewhere.open_page("GPU-1")


def test_what_is_copied_to_another_gpu_is_the_chunk_and_its_digests() -> None:
    [chunk] = init_info().chunks()
    tensors = [torch.randn(2, 3).bfloat16(), torch.randn(())]
    packed = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
    pack(chunk, iter(zip(["a", "b"], tensors, strict=True)), packed)
    sent = packed_chunk(chunk, packed).sent
    assert sent is not None
    local = LocalChunk([chunk], torch.device("cpu"))
    in_place = ReceivedChunk(chunk=chunk, memory_key=0, sent=sent, read=lambda: tensors)
    for copy in (lambda: local.tensors(in_place), lambda: packed_chunk(chunk, local.block(packed))):
        copied = copy()
        assert all(map(torch.equal, copied.read(), tensors))
        assert copied.sent is not None and torch.equal(copied.sent, sent)
        assert {each.untyped_storage().data_ptr() for each in copied.read()} == {copied.memory_key}
        local.block(torch.zeros_like(packed))


@pytest.mark.parametrize("location", [(-1, 0), (1, 0), (0, -1), (0, 4073)])
def test_a_tensor_outside_of_the_opened_memory_is_refused(location: tuple[int, int]) -> None:
    entry = Entry(name="w", dtype=torch.float32, shape=(2, 3), offset=0)
    check_location(TensorLocation(0, 4072), entry, [4096])
    with pytest.raises(ValueError, match=r"^'w' \(24 bytes\) is outside of the opened memory$"):
        check_location(TensorLocation(*location), entry, [4096])


def test_a_table_of_digests_that_is_too_short_is_refused_before_it_is_opened() -> None:
    tensors = ResidentTensors(storages=(), tensors=(TensorLocation(0, 0),) * 3, digests=handle(16))
    with pytest.raises(ValueError, match=r"^the digests of 3 tensors need 24 bytes, got 16$"):
        OpenedTensors(tensors, torch.device("cpu"))


@pytest.fixture
def page() -> Iterator[tuple[str, Page]]:
    name, created = create_page(world_size=3, timeout_s=0.2)
    yield name, created
    remove_segment(name)


def test_page_is_shared_and_outlives_its_name(page: tuple[str, Page]) -> None:
    name, ours = page
    assert len(ours) == TAKEN + 3 and ours.workers() == [] and ours[PUBLISHED] == 0 > ours[ABANDONED]
    with pytest.raises(ValueError, match=r"must have 64 bytes, it has 56$"):
        open_page(name, 4, 0.2)
    theirs = open_page(name, 3, 0.2)
    theirs[TAKEN + 2] = 0
    assert ours.workers() == [TAKEN + 2]
    remove_segment(name)
    ours[PUBLISHED] = 7 << 32 | 1
    assert theirs[PUBLISHED] == 7 << 32 | 1
    with pytest.raises(ValueError, match=rf"^segment '{name}' does not exist on this host$"):
        open_page(name, 3, 0.2)


def test_a_wait_without_progress_ends_at_the_timeout_and_names_the_peer(page: tuple[str, Page]) -> None:
    with pytest.raises(TransferFailed, match=r"^the publisher: no progress in 0\.2 s$"):
        page[1].wait(lambda: False, "the publisher")


def test_an_abort_that_comes_before_the_staging_thread_receives_ends_that_wait(
    page: tuple[str, Page], tmp_path: Path
) -> None:
    name, _ = page
    write_checkpoint(tmp_path, [("a", torch.zeros(3))])
    parts: Any = SimpleNamespace()
    engine = IpcWeightTransferEngine(
        parts, worker_config(str(tmp_path)), torch.device("cpu"), torch.nn.Module()
    )
    engine._counters, engine._chunks = open_page(name, 3, timeout_s=10.0), init_info().chunks()
    engine._buffers = [torch.empty(1 << 10, dtype=torch.uint8)] * 2
    engine.start_weight_update()
    received = engine.receive(IpcUpdateInfo(round_id=1))
    engine.abort()
    with pytest.raises(TransferFailed, match=r"^the transfer was aborted$"):
        next(received)
    engine.start_weight_update()
    open_page(name, 3, 0.2)[PUBLISHED] = 2 << 32 | 1
    assert next(engine.receive(IpcUpdateInfo(round_id=2))).chunk == engine._chunks[0]
