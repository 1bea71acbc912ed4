"""How adapters go: when no request can begin with one any more, and when no replica has it."""

from collections.abc import Iterable
from dataclasses import dataclass

from deployments.ledger.adapters.convergence import Convergence
from deployments.ledger.adapters.loads import asked_to_load
from deployments.ledger.members import Member, PendingCall
from deployments.ledger.membership import Membership
from deployments.protocol.adapters import Adapter, AdapterCatalog, SetAdapters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Unload:
    ids: set[int]
    call: PendingCall


class Unloads:
    """Unloads that are pending: replicas may still begin requests with what the catalog has no more."""

    def __init__(self, membership: Membership, convergence: Convergence) -> None:
        self._membership = membership
        self._convergence = convergence
        self._pending: list[_Unload] = []

    def begin(self, ids: set[int]) -> PendingCall:
        """These are out of the catalog. The call ends when requests may name them nowhere."""
        call = PendingCall(name=SetAdapters.name)
        self._pending.append(_Unload(ids=ids, call=call))
        return call

    def answer(self, catalog: AdapterCatalog) -> None:
        """End the calls that are over."""
        serving = self._membership.serving()
        for unload in list(self._pending):
            if not any(unload.ids & self._convergence.nameable(each, catalog) for each in serving):
                self._pending.remove(unload)
                unload.call.finish(result=None)


def nowhere(retired: Iterable[Adapter], members: Iterable[Member]) -> set[int]:
    """Ids of retired adapters that no replica holds, or may still be loading."""
    there: set[int] = set()
    for member in members:
        there.update(member.adapters.held, member.adapters.live)
        there.update(each.adapter_id for each in retired if asked_to_load(member, each.adapter_id))
    return {each.adapter_id for each in retired} - there
