"""How workers join the store that vLLM's trainer opens: all of them, or none."""

import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.rendezvous import meet
from deployments.weights.transports.vllm_nccl import VllmMeeting, read_unique_id
from tests.deployments.weights.transports.rendezvous_info import info_for, no_check

TIMEOUT_S = 3.0


def trainer(info: Any, says: Any = None) -> StatelessProcessGroup:
    """vLLM's own rank 0: opens the store, waits for as many as the group has members, leaves an object."""
    group = StatelessProcessGroup.create(info.master_address, info.master_port, 0, info.world_size)
    group.broadcast_obj(ncclUniqueId() if says is None else says, src=0)
    return group


def test_workers_receive_the_id_and_each_others_payload() -> None:
    info = info_for(3, TIMEOUT_S)
    meetings = [VllmMeeting(info, rank, f"from {rank}") for rank in (1, 2)]
    with ThreadPoolExecutor(max_workers=3) as calls:
        theirs: Future[StatelessProcessGroup] = calls.submit(trainer, info)
        joined = list(calls.map(lambda meeting: meet(meeting, no_check), meetings))
        group = theirs.result(TIMEOUT_S)
    for meeting in meetings:
        assert meeting.payloads == ["from 1", "from 2"] and meeting.unique_id == bytes(128)
    joined[0].set("key", "value")
    assert PrefixStore("slipstream", group.store).get("key") == b"value", "beside vLLM's own keys"


@pytest.mark.slow
def test_absent_worker_is_named_by_the_others() -> None:
    info = info_for(4, TIMEOUT_S)
    threading.Thread(target=_ignoring_timeouts, args=(info,), daemon=True).start()
    meetings = [VllmMeeting(info, rank, "") for rank in (1, 3)]
    with ThreadPoolExecutor(max_workers=2) as calls:
        waiting = [calls.submit(meet, meeting, no_check) for meeting in meetings]
        for each in waiting:
            error = each.exception(4 * TIMEOUT_S)
            assert isinstance(error, TransferFailed) and error.missing_ranks == (2,), error


def _ignoring_timeouts(info: Any) -> None:
    """vLLM's `create` closes the store's socket a second time if this fails: maybe another test's file."""
    timeout = timedelta(seconds=3 * TIMEOUT_S)
    with suppress(RuntimeError):
        TCPStore(
            info.master_address, info.master_port, info.world_size, True, timeout=timeout, use_libuv=False
        )


def test_absent_trainer_is_named_and_the_wait_can_be_aborted() -> None:
    with pytest.raises(TransferFailed, match="rank 0 has not opened the rendezvous") as caught:
        meet(VllmMeeting(info_for(2, 0.3), 1, ""), no_check)
    assert caught.value.missing_ranks == (0,)

    def stop() -> None:
        raise TransferFailed("the connection was aborted")

    with pytest.raises(TransferFailed, match="the connection was aborted"):
        meet(VllmMeeting(info_for(2, 60.0), 1, ""), stop)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (pickle.dumps(_Evil()), r"posix\.system is no part of a unique id"),
        (pickle.dumps("text"), "no NCCL unique id of 128 bytes"),
        (pickle.dumps(bytes(127)), "no NCCL unique id of 128 bytes"),
        (b"no pickle", "the publisher left no NCCL unique id"),
    ],
)
def test_nothing_but_a_unique_id_is_read(left: bytes, message: str) -> None:
    with pytest.raises(TransferFailed, match=message):
        read_unique_id(left)
