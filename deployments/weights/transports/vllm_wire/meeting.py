"""How a worker joins the group of vLLM's `nccl` trainer engine.

The trainer (rank 0) opens vLLM's store, waits until as many have connected as the group has members, and
leaves NCCL's unique id there. The workers also tell each other in that store that they are there: NCCL itself
would wait for a missing one without an end.
"""

import io
import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES

from deployments.errors import TransferFailed
from deployments.weights.transports.rendezvous import Meeting, RendezvousInfo, probe

UNIQUE_ID = "broadcast_from/0/0"  # the key of vLLM's `StatelessProcessGroup` for the first object of rank 0


class VllmMeeting(Meeting):
    """One worker's part. `payloads` are those of the workers, from rank 1.

    Attributes:
        unique_id: NCCL's, of the group.
    """

    unique_id = b""

    def __init__(self, info: RendezvousInfo, rank: int, payload: str) -> None:
        assert rank > 0, "rank 0 is vLLM's trainer engine"
        super().__init__(info, rank, payload)

    def join(self) -> None:
        info = self.info
        self.wait_for(lambda: probe(info), lambda: [0])
        # As vLLM's own workers connect: rank 0 counts those that do.
        store = TCPStore(
            info.master_address,
            info.master_port,
            info.world_size,
            False,
            timedelta(seconds=info.timeout_s),
            wait_for_workers=True,
            use_libuv=False,
        )
        ours = PrefixStore("slipstream", store)
        keys = {peer: f"member/{peer}" for peer in range(1, info.world_size)}
        ours.set(keys[self.rank], self.payload)
        self.wait_for(
            lambda: bool(ours.check(list(keys.values()))),
            lambda: [peer for peer, key in keys.items() if not ours.check([key])],
        )
        self.wait_for(lambda: bool(store.check([UNIQUE_ID])), lambda: [0])
        self.payloads = [ours.get(key).decode() for key in keys.values()]
        self.unique_id = read_unique_id(store.get(UNIQUE_ID))
        self.store = ours


def read_unique_id(data: bytes) -> bytes:
    """NCCL's unique id from vLLM's pickle of it; nothing else is unpickled, and nothing is called.

    Raises:
        TransferFailed: the publisher has left something else.
    """
    try:
        found = _IdOnly(io.BytesIO(data)).load()
    except Exception as error:  # the bytes of a pickle decide which exception it raises
        raise TransferFailed(f"the publisher left no NCCL unique id: {error}") from error
    if not isinstance(found, bytes) or len(found) != NCCL_UNIQUE_ID_BYTES:
        raise TransferFailed(f"the publisher left no NCCL unique id of {NCCL_UNIQUE_ID_BYTES} bytes")
    return found


def _content(of: Any, state: Any) -> Any:
    """Stands for ctypes' own function, which would make a structure: (its dictionary, its bytes)."""
    return state[1]


class _IdOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _content
        if (module, name) == ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a unique id")
