"""Instructions of a round, as a replica receives them."""

from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import Commit, KvCache, Receive


def receive(round_id: int = 1, retain: int | None = None) -> Receive:
    return Receive(round_id=round_id, payload={"x": 1}, retain_version=retain)


COMMIT = Commit(round_id=1, version=4, hold=True, kv_cache=KvCache.RECOMPUTE, in_flight=InFlight.KEEP)
