"""What each replica is told of adapters.

Nothing is remembered of a replica but its last report: what it holds and what requests may name there. That
is compared with the catalog after each event, and it is sent the first thing that is missing. So a joiner, a
replica that returns after a restart of the controller, and one that missed something are all the same case.

One thing more is known: whether this process has told it what requests may name. Before, it may still be at a
directive of an earlier controller, and what it reports can change.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from deployments.ledger.adapters.loads import Load, asked_to_load
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import Member, MemberState, PendingCall, classify
from deployments.ledger.membership import Membership
from deployments.protocol.adapters import Adapter, AdapterCatalog, DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.poll import Body

KINDS = (LoadAdapter, SetAdapters, DropAdapter)


class OnLoaded(Protocol):
    def __call__(self, call: PendingCall, now: float, load: Load) -> None: ...


class Convergence:
    """Brings each replica to the catalog.

    Args:
        on_loaded: called with the answer of a replica that was told to load what is not live yet.
    """

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        on_loaded: OnLoaded,
    ) -> None:
        self._membership = membership
        self._dispatch = dispatch
        self._on_loaded = on_loaded
        self._dropped: set[tuple[str, int]] = set()  # (incarnation, id) that were told to drop it
        self._set: set[str] = set()  # incarnations that have carried out a SET_ADAPTERS of this process
        self._succeeds = False  # there was one before it whose fleet had adapters

    def recover(self) -> None:
        self._succeeds = True

    def advance(
        self, catalog: AdapterCatalog, loads: Collection[Load], now: float, *, but: Collection[Member] = ()
    ) -> None:
        """Send each replica the first thing that is missing there, and nothing to those in `but`."""
        live = self._membership.live()
        self._dropped &= {(member.incarnation, held) for member in live for held in member.adapters.held}
        for member in live:
            if not (member.loading or busy(member) or member in but):
                self._converge(member, catalog, loads, now)

    def _converge(self, member: Member, catalog: AdapterCatalog, loads: Collection[Load], now: float) -> None:
        held = set(member.adapters.held)
        for adapter in catalog.live:
            if adapter.adapter_id not in held:
                self._send(member, LoadAdapter(adapter=adapter), self._restored, now)
                return
        if not self.is_set(member, catalog):
            self._send(member, SetAdapters(live=tuple(catalog.live)), self._restored, now)
            return
        if member.state is MemberState.SERVING:
            for load in loads:
                if load.wanted and member.incarnation not in load.asked:
                    load.asked.add(member.incarnation)
                    self._send(
                        member, LoadAdapter(adapter=load.adapter), partial(self._on_loaded, load=load), now
                    )
                    return
        for adapter_id in sorted(held - _wanted_ids(catalog, loads)):
            if (member.incarnation, adapter_id) not in self._dropped:
                self._dropped.add((member.incarnation, adapter_id))
                self._send(member, DropAdapter(adapter_id=adapter_id), self._restored, now)
                return

    def _send(
        self, member: Member, body: Body, on_complete: Callable[[PendingCall, float], None], now: float
    ) -> None:
        self._dispatch.send_each(body.name, {member: body}, now, on_complete=on_complete)

    def _restored(self, call: PendingCall, now: float) -> None:
        """What is live must be everywhere: one that cannot follow is replaced."""
        verdict = classify(call)
        self._membership.fence_each(verdict.not_done, call.name, now)
        if call.name == SetAdapters.name:
            members = (self._membership.get(each) for each in verdict.done)
            self._set |= {each.incarnation for each in members if each is not None}

    def is_set(self, member: Member, catalog: AdapterCatalog) -> bool:
        """Whether requests may name exactly the live ones there, and nothing it was told can change that.

        A replica goes through a directive of an earlier controller to its end. Only what this one told it is
        certain to be the last.
        """
        return self._is_told(member) and tuple(member.adapters.live) == tuple(
            each.adapter_id for each in catalog.live
        )

    def _is_told(self, member: Member) -> bool:
        return member.incarnation in self._set or not self._succeeds

    def is_everywhere(self, adapter: Adapter) -> bool:
        """Whether requests may name it on all replicas that take some."""
        serving = self._membership.serving()
        everywhere = all(adapter.adapter_id in each.adapters.live for each in serving)
        return everywhere and not self._membership.uncertain()

    def nameable(self, member: Member, catalog: AdapterCatalog) -> set[int]:
        """Ids that requests may name there, or may when it has done what it was told."""
        if not self._is_told(member):
            return {each.adapter_id for each in (*catalog.live, *catalog.retired)}
        bodies = (queued.instruction.body for queued in member.queue)
        queued = (each.live for each in bodies if isinstance(each, SetAdapters))
        return {*member.adapters.live, *(each.adapter_id for live in queued for each in live)}


def _wanted_ids(catalog: AdapterCatalog, loads: Collection[Load]) -> set[int]:
    """Ids that a replica is to hold, or may. It keeps what it was told to drop while requests use it."""
    live = {each.adapter_id for each in catalog.live}
    return live | {each.adapter.adapter_id for each in loads if each.wanted}


def busy(member: Member) -> bool:
    """It has something of ours to do: its report will say more."""
    return any(isinstance(queued.instruction.body, KINDS) for queued in member.queue)


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
