"""A rendezvous on this host, for tests that form groups of threads."""

from deployments.weights.transports.rendezvous import RendezvousInfo
from tests.deployments.weights.transports.transport_contract import free_port


def info_for(world_size: int, timeout_s: float) -> RendezvousInfo:
    return RendezvousInfo(
        master_address="127.0.0.1",
        master_port=free_port(),
        rank_offset=1,
        world_size=world_size,
        names=[],
        dtype_names=[],
        shapes=[],
        chunk_bytes=1 << 20,
        timeout_s=timeout_s,
    )


def no_check() -> None:
    """A check that never ends a wait."""
