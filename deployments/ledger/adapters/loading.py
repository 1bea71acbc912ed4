"""How an adapter becomes live on all replicas or on none, and how it goes.

    caller    begin ─► (the shell copies the files) ─► stage ─► PendingCall
    replicas  LOAD_ADAPTER ─► all serving ones hold it ─► decision, durable ─► SET_ADAPTERS ─► answer
              one rejects it ─► DROP_ADAPTER where it is held ─► the caller's error

What a replica is told follows from its last report: see `convergence`. While a round that holds all replicas
until the last one has swapped comes to its decision and is carried out, they are told nothing of adapters: a
load ahead of one replica's COMMIT would stop the whole fleet for as long as it takes.

A replica that fails or misses the deadline is fenced, and the load goes on without it. Its successor has
every live adapter before it takes requests (`converged`).
"""

from collections.abc import Callable

from deployments.ledger.adapters.catalog import (
    AdapterLimits,
    LoadTimes,
    check_free,
    check_name,
    check_newest,
    check_room,
    listing,
    named,
    next_adapter,
    numbered,
    with_files,
    with_live,
    without,
    without_retired,
)
from deployments.ledger.adapters.convergence import Convergence, Unloads, busy, nowhere
from deployments.ledger.adapters.loads import Load, check_idle, fault, withdrawn
from deployments.ledger.decisions import Cataloged, DecisionLog, EventLog
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import Member, PendingCall, classify
from deployments.ledger.membership import Membership
from deployments.ledger.rounds.round import RoundPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.protocol.adapters import (
    Adapter,
    AdapterCatalog,
    AdapterFiles,
    AdapterStatus,
    LoadAdapter,
)
from deployments.protocol.errors import Conflict, InvalidRequest, SlipstreamError


class Adapters:
    """The catalog, and the loads and unloads that are pending."""

    def __init__(
        self,
        membership: Membership,
        dispatch: Dispatch,
        decisions: DecisionLog,
        events: EventLog,
        limits: AdapterLimits,
        check_awake: Callable[[], None],
        versions: VersionState,
    ) -> None:
        self._check_awake = check_awake
        self._versions = versions
        self._membership = membership
        self._decisions = decisions
        self._events = events
        self._limits = limits
        self._loads: dict[str, Load] = {}  # by name
        self._times: dict[int, LoadTimes] = {}  # of this process's loads, by adapter id
        self._convergence = Convergence(membership, dispatch, self._loaded)
        self._unloads = Unloads(membership, self._convergence)
        self.catalog = AdapterCatalog()

    # -- calls --------------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        *,
        in_place: bool,
        is_3d: bool,
        now: float,
        after: int | None = None,
        load_id: str = "",
    ) -> Adapter:
        """Reserve the next version of a name; `stage` or `give_up` follows.

        Args:
            in_place: vLLM's `load_inplace`. Here the name gets another version, and nothing is overwritten.
            after: the newest live version that the caller knows, 0 for none. None: whatever it is.
            load_id: for `loaded`; no two loads have the same, but for none.

        Raises:
            InvalidRequest: no name of an adapter, the full name of a live version, or a name that is live and
                `in_place` is false.
            Conflict: it is being loaded, is not at version `after`, there is no room, or the weights sleep.
        """
        self._check_enabled()
        check_name(name, self._limits.base_model)
        check_idle(self._loads.values(), name)
        check_free(self.catalog, name)
        if not in_place and any(each.name == name for each in self.catalog.live):
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                {"lora_name": name},
            )
        check_newest(self.catalog, name, after)
        self._check_awake()
        check_room(self.catalog, self._loads, self._limits)
        taken = {self._limits.base_model, *self._loads}
        adapter = next_adapter(self.catalog, name, is_3d=is_3d, load_id=load_id, taken=taken)
        times = self._times[adapter.adapter_id] = LoadTimes(begun=now)
        self._loads[name] = Load(adapter=adapter, times=times)
        # Durable before a replica learns of the id: one that keeps it over a restart must not meet another.
        self._decide(numbered(self.catalog, adapter))
        self._record(adapter, "loading", now)
        return adapter

    def stage(self, adapter: Adapter, files: AdapterFiles, now: float) -> PendingCall:
        """The files are there, and not durable yet: `complete` or `fail` follows, and nothing is live before.

        The call's result is the live Adapter. Its error is an InvalidRequest if all replicas rejected it, a
        Conflict if some did, FleetUnavailable if too few replicas serve; then no replica has it.
        """
        load = self._loads[adapter.name]
        load.adapter = with_files(adapter, files)
        load.call, load.times.staged = PendingCall(name=LoadAdapter.name), now
        return load.call

    def complete(self, adapter: Adapter, now: float) -> None:
        """The fleet's copy is durable."""
        load = self._loads.get(adapter.name)
        if load is not None and load.adapter.adapter_id == adapter.adapter_id:
            load.times.stored = now

    def fail(self, adapter: Adapter, error: SlipstreamError) -> None:
        """The fleet will have no copy of what was staged: no replica keeps it."""
        load = self._loads.get(adapter.name)
        if load is not None and load.adapter.adapter_id == adapter.adapter_id and not load.stored:
            load.error = load.error or error

    def give_up(self, adapter: Adapter, reason: str, now: float) -> None:
        """Its files could not be copied."""
        del self._loads[adapter.name]
        self._record(adapter, "failed", now, reason)

    def unload(self, name: str, now: float) -> PendingCall:
        """No request begins with the versions of a name (or with the one of a full name) any more.

        Raises:
            NotFound: there is none.
            Conflict: it is being loaded.
        """
        self._check_enabled()
        check_idle(self._loads.values(), name)
        out = named(self.catalog, name)
        ids = {each.adapter_id for each in out}
        self._decide(without(self.catalog, ids))
        for each in out:
            self._record(each, "retired", now)
        return self._unloads.begin(ids)

    def recover(self, catalog: AdapterCatalog) -> None:
        self.catalog = catalog
        self._convergence.recover()

    # -- queries ------------------------------------------------------------------------------

    def needed(self) -> set[int]:
        """The ids whose files must stay."""
        pending = {load.adapter.adapter_id for load in self._loads.values()}
        return pending | {each.adapter_id for each in (*self.catalog.live, *self.catalog.retired)}

    def converged(self, member: Member) -> bool:
        """Whether it has all live adapters, and requests may name them and no others."""
        return not busy(member) and self._convergence.is_set(member, self.catalog)

    def settled(self, load_id: str) -> bool:
        """Whether the load has failed, or what it loaded is on all replicas that take requests."""
        if any(load.adapter.load_id == load_id for load in self._loads.values()):
            return False
        found = next((each for each in self.catalog.live if each.load_id == load_id), None)
        return found is None or self._convergence.is_everywhere(found)

    def loaded(self, load_id: str) -> Adapter | None:
        """What this load has made live; None: nothing, or it is gone from all replicas again."""
        adapters = (*self.catalog.live, *self.catalog.retired)
        return next((each for each in adapters if each.load_id == load_id), None)

    def status(self) -> list[AdapterStatus]:
        loading = [load.adapter for load in self._loads.values() if not load.decided]
        return listing(self.catalog, loading, self._membership.all(), self._times)

    # -- progress -----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Send what is missing, and end what is complete."""
        self._convergence.advance(self.catalog, self._loads.values(), now, but=self._committing())
        if self._conclude(now):
            self._convergence.advance(self.catalog, self._loads.values(), now, but=self._committing())
        self._answer(now)
        self._clear()
        if len(self._times) > len(self._loads) + len(self.catalog.live) + len(self.catalog.retired):
            needed = self.needed()
            self._times = {key: times for key, times in self._times.items() if key in needed}

    def _committing(self) -> tuple[Member, ...]:
        """Replicas that wait for each other's COMMIT, or will before they could load anything."""
        current = self._versions.current
        if current is None or current.phase is RoundPhase.OPEN or not current.hold:
            return ()
        return current.participants

    def _loaded(self, call: PendingCall, now: float, load: Load) -> None:
        verdict = classify(call)
        load.times.answered(call)
        self._membership.fence_each(verdict.replica_failed, call.name, now)
        load.rejected |= {**verdict.rejected, **verdict.transfer_failed}
        for replica_id in verdict.done:
            member = self._membership.get(replica_id)
            if member is not None and load.adapter.adapter_id not in member.adapters.held:
                self._membership.fence(member, f"{call.name}: done, and it does not hold it", now)

    def _conclude(self, now: float) -> bool:
        """Decide what all have answered. True if replicas are to be told something else than before."""
        changed = False
        for load in list(self._loads.values()):
            if load.call is None or load.decided or self._membership.returning():
                continue
            if load.error is None:
                load.error = fault(load, self._membership)
                changed = changed or load.error is not None
            if load.error is not None:
                self._undo(load, load.error, now)
            elif not load.rejected and self._all_hold(load.adapter):
                if load.times.held is None:
                    load.times.held = now
                if load.stored:
                    self._make_live(load, now)
                    changed = True
        return changed

    def _all_hold(self, adapter: Adapter) -> bool:
        return all(adapter.adapter_id in each.adapters.held for each in self._membership.serving())

    def _make_live(self, load: Load, now: float) -> None:
        before = self.catalog.live
        self._decide(with_live(self.catalog, load.adapter, self._limits.keep))
        load.decided = True
        self._record(load.adapter, "live", now)
        for each in before:
            if each not in self.catalog.live:
                self._record(each, "retired", now)

    def _undo(self, load: Load, error: SlipstreamError, now: float) -> None:
        """Answer with the error once no replica has it."""
        if not withdrawn(load, self._membership):
            return
        del self._loads[load.adapter.name]
        self._record(load.adapter, "failed", now, error.message)
        if load.call is not None:
            load.call.finish(error=error)

    def _answer(self, now: float) -> None:
        """End the calls whose catalog all replicas have that take requests."""
        if self._membership.uncertain():
            return
        for load in list(self._loads.values()):
            if load.decided and self._convergence.is_everywhere(load.adapter):
                del self._loads[load.adapter.name]
                load.times.live = now
                if load.call is not None:
                    load.call.finish(result=load.adapter)
        self._unloads.answer(self.catalog)

    def _clear(self) -> None:
        """Forget retired versions that no replica has any more."""
        if not self.catalog.retired or self._membership.returning():
            return
        if gone := nowhere(self.catalog.retired, self._membership.all()):
            self._decide(without_retired(self.catalog, gone))

    # -- what they are made of ----------------------------------------------------------------

    def _check_enabled(self) -> None:
        if self._limits.refusal is not None:
            raise Conflict(f"this fleet serves no adapters: {self._limits.refusal}")

    def _decide(self, catalog: AdapterCatalog) -> None:
        self.catalog = catalog
        self._decisions.append(Cataloged(catalog=catalog))

    def _record(self, adapter: Adapter, phase: str, now: float, reason: str = "") -> None:
        self._events.record(
            "adapter", now, lora_name=adapter.name, version=adapter.version, phase=phase, reason=reason
        )
