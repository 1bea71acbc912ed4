import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.trainer import host_copies
from deployments.trainer.host_copies import in_host_memory
from deployments.trainer.weight_publisher import PublishSource
from tests.tiny_models import tiny_llama
from trainers.sources import ParameterSource


def take(source: PublishSource) -> dict[str, torch.Tensor]:
    source.begin()
    assert list(source)
    return source.take_copy()


def published(source: ParameterSource) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in source}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_snapshot_does_not_change_with_the_model(
    tmp_path: Path, device: str, dtype: torch.dtype | None
) -> None:
    model = tiny_llama(1).to(device)
    source = ParameterSource(model, dtype=dtype)
    publishing = PublishSource(source, keep_copy=True)
    expected, snapshot = published(source), take(publishing)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    second = take(publishing)
    save_file(snapshot, tmp_path / "first.safetensors")
    found = load_file(tmp_path / "first.safetensors")
    assert list(snapshot) == list(expected) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(bool((tensor == 0.5).all()) for tensor in second.values())


@pytest.mark.gpu
def test_the_memory_of_a_snapshot_is_reused_once_it_is_freed() -> None:
    source = PublishSource(ParameterSource(tiny_llama(1).cuda()), keep_copy=True)
    first = take(source)
    name = next(iter(first))
    address = first[name].data_ptr()
    second = take(source)
    assert second[name].data_ptr() != address, "the first is still held"
    del first
    assert take(source)[name].data_ptr() == address


def test_a_tensor_in_host_memory_is_not_copied() -> None:
    content = torch.arange(5, dtype=torch.uint8)
    assert in_host_memory(content) is content


@pytest.mark.gpu
def test_a_copy_waits_for_what_was_queued_and_not_for_what_is_queued_later() -> None:
    content = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    in_host_memory(content)  # pinned memory, once
    torch.cuda._sleep(50_000_000)  # cycles: longer than the copy
    content.fill_(7)
    queued = torch.cuda.Event()
    queued.record()
    copy = in_host_memory(content)
    assert queued.query() and copy.is_pinned() and torch.equal(copy, content.cpu())


@pytest.mark.gpu
def test_what_is_queued_does_not_wait_for_a_copy() -> None:
    content = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    in_host_memory(content.add_(1))  # a kernel is loaded with its first use, which waits for the device
    with torch.cuda.stream(host_copies._stream(content.device)):
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second: the copy comes after it
        slept = torch.cuda.Event()
        slept.record()
    thread = threading.Thread(target=in_host_memory, args=(content,))
    thread.start()
    time.sleep(0.2)
    queued = torch.cuda.Event()
    assert not slept.query(), "too short: this would say nothing"
    content.add_(1)
    queued.record()
    queued.synchronize()
    assert not slept.query() and thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()
