"""Copies of a trainer's tensors in host memory."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from deployments.trainer.lora import host_copies as module
from deployments.trainer.lora.host_copies import copied_together, host_copies, in_host_memory


def tensors(device: str) -> list[torch.Tensor]:
    made = [torch.randn(3, 4), torch.randn(()), torch.arange(6), torch.randn(5, 2).T, torch.randn(2, 0)]
    return [each.to(device) for each in made]


def test_what_is_in_host_memory_is_not_copied() -> None:
    given = tensors("cpu")
    for before, after in zip(given, host_copies(given), strict=True):
        assert torch.equal(before, after) and after.is_contiguous()
    assert host_copies(given)[0].data_ptr() == given[0].data_ptr()


def test_tensors_that_are_copied_together_can_be_written(tmp_path: Path) -> None:
    given = [torch.randn(3, 4), torch.randn(()), torch.randn(2, 2)]
    made = copied_together(given)
    for before, after in zip(given, made, strict=True):
        assert torch.equal(before, after) and after.is_contiguous()
    file = tmp_path / "file"
    file.write_bytes(save({str(index): each for index, each in enumerate(made)}))
    read = load_file(file)
    assert all(torch.equal(read[str(index)], each) for index, each in enumerate(made))


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_from_a_gpu(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "COPIED_AT_ONCE", at_once)
    given = tensors("cuda")
    for before, after in zip(given, host_copies(given), strict=True):
        assert after.device.type == "cpu" and after.is_contiguous()
        assert torch.equal(before.cpu(), after)


def test_a_tensor_in_host_memory_is_the_copy() -> None:
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
    host_copies([content.add_(1)])  # a kernel is loaded with its first use, which waits for the device
    with torch.cuda.stream(module._stream(content.device)):
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second: the copy comes after it
        slept = torch.cuda.Event()
        slept.record()
    thread = threading.Thread(target=host_copies, args=([content],))
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


@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_batches_hold_every_tensor_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "COPIED_AT_ONCE", at_once)
    given = tensors("cpu")
    batches = list(module._batches(given, range(len(given))))
    assert [index for batch in batches for index in batch] == list(range(len(given)))
    assert all(len(batch) == 1 or sum(given[i].nbytes for i in batch) <= at_once for batch in batches)
