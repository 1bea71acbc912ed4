"""Receivers without a vLLM engine, and the client that drives them as the fleet would.

A receiver is the real transfer engine of a transport with host staging. On a CPU it runs in this
process; CUDA IPC and NCCL need one process each.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.distributed.weight_transfer import ParamMeta

from deployments.protocol.poll import FilePart, Outcome
from deployments.vllm_versions import Source
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.staged_update import StagingState
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.transports.registry import PACKAGE, TRANSPORTS
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk, view
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest
from tests.forked import started

DEADLINE_S = 90.0
POLL_S = 0.002

Tensors = list[tuple[str, torch.Tensor]]
Engine = StagedWeightTransferEngine[Any, Any]


class ListSource(Source):
    """A source that yields `tensors` and declares `declared` (by default the same).

    Args:
        before: called before each tensor, with its index; may block or raise.
    """

    def __init__(
        self, tensors: Tensors, declared: Tensors | None = None, before: Callable[[int], None] | None = None
    ) -> None:
        self.tensors = tensors
        self._declared = tensors if declared is None else declared
        self.before = before

    def specs(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._declared]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self.tensors):
            if self.before is not None:
                self.before(index)
            yield pair


class Resident(ListSource):
    """A source whose tensors stay at their addresses: no pass is needed.

    Args:
        declared: in the dtypes that are to be sent.
    """

    def resident(self) -> list[torch.Tensor]:
        return self._resident

    def __init__(self, tensors: Tensors, declared: Tensors | None = None) -> None:
        super().__init__(tensors, declared)
        self._resident = [tensor for _, tensor in tensors]

    def move(self) -> None:
        """To other memory, with the same content."""
        self.tensors = [(name, tensor.clone()) for name, tensor in self.tensors]
        self._resident = [tensor for _, tensor in self.tensors]


class Receiver:
    """The transfer engine of one worker, and what a test calls of it."""

    def __init__(self, transport: str, directory: str, device: str, corrupt: bool = False) -> None:
        self._arguments = (transport, directory, torch.device(device), corrupt)
        self.engine = _engine(*self._arguments)

    def reset(self) -> None:
        self.engine.shutdown()
        self.engine = _engine(*self._arguments)

    def connect(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start(self) -> None:
        self.engine.start_weight_update()

    def update(self, info: dict[str, Any]) -> None:
        self.engine.update_weights(info)

    def read_part(self, part: FilePart) -> None:
        self.engine.read_part(part)

    def progress(self) -> StagingState:
        return self.engine.progress()

    def verify(self) -> StagingState:
        return self.engine.verify()

    def drop(self) -> float:
        start = time.perf_counter()
        self.engine.drop()
        return time.perf_counter() - start

    def staged(self) -> str:
        """The digest of the staged tensors, computed anew."""
        tensors = self.engine.staging._tensors
        return version_digest(list(tensors), digests(list(tensors.values())))

    def damage(self, name: str) -> None:
        """Change a byte of a tensor that the staging keeps of the last round."""
        staging = self.engine.staging
        assert isinstance(staging, LastRound)
        staging.last[name].view(-1).view(torch.uint8)[0] ^= 1

    def stop(self) -> None:
        self.engine.shutdown()


class LastRound(HostStaging):
    """Keeps the last update on its device, as a shadow does."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module(), None)
        self.last: dict[str, torch.Tensor] = {}
        self._is_open = False

    def begin(self) -> None:
        super().begin()
        self._is_open = False

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        return all(name in self.last for chunk in chunks for name in chunk.offered)

    def reopen(self) -> None:
        self._is_open = True

    def restore(self, chunk: Chunk, block: torch.Tensor) -> None:
        for entry in chunk.entries:
            view(entry, block).copy_(self.last[entry.name])

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        if not self._is_open:  # as poison
            self.last = {}
        self._is_open = True
        copies = [(name, tensor.clone()) for name, tensor in tensors]
        super().add(chunk, copies)
        self.last |= dict(copies)


class ProcessReceiver:
    """The same, in a process of its own."""

    def __init__(self, *args: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._asking = threading.Lock()  # a call of a round that failed may still be out
        self.process = started(_serve, (theirs, *args), daemon=True)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._ask(name, args)

    def _ask(self, name: str, args: tuple[Any, ...]) -> Any:
        with self._asking:
            self._pipe.send((name, args))
            if not self._pipe.poll(DEADLINE_S):
                raise TimeoutError(f"receiver did not answer {name} in {DEADLINE_S:g} s")
            succeeded, value = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(value)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, *args: Any) -> None:
    receiver = Receiver(*args)
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(receiver, name)(*arguments)))
        except Exception as error:  # raised in the test's process
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Rejected(Exception):
    """A receiver has reported another outcome than DONE."""


@dataclass
class Fleet:
    """vLLM's weight-sync client over a few receivers, each with its own rank."""

    receivers: list[Any]
    payloads: int = 0
    first_rank: int = 1
    started: threading.Event = field(default_factory=threading.Event)  # an update, on all receivers

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        for index, receiver in enumerate(self.receivers):
            own: dict[str, Any] = {}
            if "rank_offset" in info:
                own["rank_offset"] = self.first_rank + index
            receiver.connect({**info, **own})
        _until(self.progress, lambda state: state.payloads_done > 0)

    def start_weight_update(self) -> None:
        self.payloads = 0
        for receiver in self.receivers:
            receiver.start()
        self.started.set()

    def update_weights(self, info: Any) -> None:
        self.payloads += 1
        for receiver in self.receivers:
            receiver.update(info)
        _until(self.progress, lambda state: state.payloads_done >= self.payloads)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass  # nothing is swapped here: there is no model

    def progress(self) -> list[StagingState]:
        return [receiver.progress() for receiver in self.receivers]

    def verify(self) -> list[StagingState]:
        return [receiver.verify() for receiver in self.receivers]

    def drop(self) -> None:
        for receiver in self.receivers:
            receiver.drop()


def _until(states: Callable[[], list[Any]], reached: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        now = states()
        for state in now:
            if state.outcome is not Outcome.DONE:
                raise Rejected(state.message)
        if all(reached(state) for state in now):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"receivers did not get there in {DEADLINE_S:g} s: {now}")
        time.sleep(POLL_S)


def worker_config(directory: str) -> Any:
    """The part of vLLM's configuration that a transfer engine reads."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_index=0),
        model_config=SimpleNamespace(model=directory, revision=None, get_total_num_hidden_layers=lambda: 1),
        load_config=LoadConfig(),
        additional_config={},
        speculative_config=None,
    )


def _engine(transport: str, directory: str, device: torch.device, corrupt: bool) -> Engine:
    config = worker_config(directory)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    record = TRANSPORTS[transport.removeprefix("staged_")]
    staged = transport == record.staged_backend  # receives vLLM's own wire
    classes = record.name.capitalize()
    module, name = record.module, f"{classes}WeightTransferEngine"
    if staged:
        module, name = f"{PACKAGE}.vllm_{record.name}", f"Staged{classes}Engine"
    kind = getattr(import_module(module), name)
    engine: Engine
    engine = (_corrupting(kind) if corrupt else kind)(SimpleNamespace(), config, device, torch.nn.Module())
    if transport == "nccl":
        engine.staging = LastRound()
    return engine


def _corrupting(kind: type[Engine]) -> type[Engine]:
    class Corrupting(kind):  # type: ignore[misc, valid-type]
        def receive(self, update_info: Any) -> Iterator[ReceivedChunk]:
            for received in super().receive(update_info):
                tensors = [tensor.clone() for tensor in received.read()]
                tensors[-1].view(-1).view(torch.uint8)[0] ^= 1
                yield replace(received, read=partial(list, tensors))

    return Corrupting


def write_checkpoint(directory: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, directory / "model.safetensors")
