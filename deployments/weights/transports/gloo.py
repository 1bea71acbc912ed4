"""Transport `gloo`: hosts without a common GPU fabric. A packed broadcast over a stateless Gloo group."""

import ipaddress
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Work

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.broadcast import (
    BroadcastReceiver,
    BroadcastSender,
    BroadcastTrainerInitInfo,
)
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.rendezvous import Check, RendezvousInfo, RollCall, rendezvous

ABORTED = "the transfer group was aborted"
_SLICE_S = 0.02  # waits are sliced, so that another thread's abort ends them


@dataclass
class GlooTrainerInitInfo(BroadcastTrainerInitInfo):
    backend: ClassVar[str] = "gloo"

    chunk_bytes: int = TRANSPORTS["gloo"].chunk_bytes


class GlooGroup:
    """A Gloo group whose waits can be aborted: ProcessGroupGloo's `abort` does nothing."""

    is_async: ClassVar[bool] = False

    def __init__(self, info: RendezvousInfo, rank: int, check: Check) -> None:
        store, _ = rendezvous(info, rank, check)
        self._roll_call = RollCall(store, rank, info.world_size)
        self._started = 0
        self._blocks: dict[int, torch.Tensor] = {}
        try:
            self._group: ProcessGroupGloo | None = create_process_group(store, info, rank)
        except RuntimeError as error:  # torch has no finer class
            raise TransferFailed(str(_failed(error)), self._roll_call.missing(0)) from error

    def reserve(self, size_bytes: int) -> None:
        """Nothing: each broadcast has a new block, which the staging may keep."""

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        if index not in self._blocks:
            self._blocks = {index: torch.empty(size_bytes, dtype=torch.uint8)}
        return self._blocks[index]

    def start(self, index: int, parts: Sequence[torch.Tensor], check: Check = lambda: None) -> None:
        for part in parts:
            self.broadcast(part, check)

    def wait(self, index: int, check: Check = lambda: None) -> None:
        """Nothing: `start` returns when the broadcasts have finished."""

    def finish(self) -> None:
        self._blocks = {}

    def broadcast(self, block: torch.Tensor, check: Check = lambda: None) -> None:
        group = self._group
        if group is None:
            raise TransferFailed(ABORTED)
        self._started += 1
        work = group.broadcast([block], _from_rank_0())
        try:
            while not _wait_slice(work):
                check()
                if self._group is None:
                    raise TransferFailed(ABORTED)
                if self._roll_call.is_called():
                    raise TransferFailed("the transfer group failed: at another member first")
        except BaseException as error:  # the group must outlive its broadcast
            if not work.is_completed():
                threading.Thread(
                    target=_wait_abandoned, args=(group, work), name="gloo-abandoned", daemon=True
                ).start()
            if isinstance(error, TransferFailed) and self._group is not None:
                raise TransferFailed(str(error), self._roll_call.missing(self._started, check)) from error
            raise
        self._roll_call.finished(self._started)

    def abort(self) -> None:
        self._group = None


def _wait_slice(work: Work) -> bool:
    """Whether the broadcast has ended. Raises TransferFailed."""
    completed = work.is_completed()
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError as error:  # a timeout or a failure: torch has one class for both
        if completed:
            raise _failed(error) from error
        return False
    return True


def _failed(error: RuntimeError) -> TransferFailed:
    return TransferFailed(f"the transfer group failed: {str(error).splitlines()[0]}")


def _wait_abandoned(group: ProcessGroupGloo, work: Work) -> None:
    """Hold a group until Gloo's thread leaves the broadcast, for which its destructor would wait."""
    with suppress(RuntimeError):
        work.wait()


class GlooWeightTransferEngine(BroadcastReceiver):
    make_group = GlooGroup


class GlooTrainerWeightTransferEngine(BroadcastSender[GlooTrainerInitInfo]):
    init_info_cls = GlooTrainerInitInfo
    make_group = GlooGroup


def create_process_group(store: PrefixStore, info: RendezvousInfo, rank: int) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=info.timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info.master_address))]
    return ProcessGroupGloo(store, rank, info.world_size, options)


def _from_rank_0() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _own_address(master_address: str) -> str:
    """This host's address as rank 0 reaches it; Gloo's default often is wrong in containers."""
    if ipaddress.ip_address(socket.gethostbyname(master_address)).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, 9))  # sends no packet
        return str(probe.getsockname()[0])
