"""How an adapter becomes live on all replicas or on none, and how it is retired.

    caller    begin ─► (the shell copies the files) ─► stage ─► PendingCall
    replicas  LOAD_ADAPTER ─► all serving ones hold it ─► decision, durable ─► SET_ADAPTERS ─► answer
              one rejects it ─► SET_ADAPTERS without it ─► the caller's error

After each event every replica's last report is compared with the catalog, and the first thing that
is missing is sent. Until this process has sent it SET_ADAPTERS, a replica may still carry out an
earlier controller's directive.

Nothing is loaded between the decision and the end of a round that holds: a load ahead of one
replica's COMMIT would stop the whole fleet.
"""

from dataclasses import replace
from functools import partial

from deployments.ledger import adapter_catalog, membership
from deployments.ledger.decisions import Cataloged
from deployments.ledger.state import (
    Load,
    LoadTimes,
    Member,
    MemberState,
    OnComplete,
    PendingCall,
    RoundPhase,
    State,
    classify,
    join_reasons,
)
from deployments.protocol.adapters import (
    Adapter,
    AdapterCatalog,
    AdapterFiles,
    AdapterStatus,
    LoadAdapter,
    LoadedAdapter,
    LoadRequest,
    SetAdapters,
)
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, SlipstreamError
from deployments.protocol.poll import Body

KINDS = (LoadAdapter, SetAdapters)


def begin(state: State, request: LoadRequest) -> Adapter:
    adapters, limits = state.adapters, state.adapter_limits
    _check_enabled(state)
    _check_idle(state, request.name)
    adapter_catalog.check_new(adapters.catalog, request, limits.base_model)
    if len(adapters.catalog.live) + len(adapters.loads) >= limits.most:
        raise Conflict(
            f"{limits.most} versions of adapters are live or being loaded, which is the limit: "
            "unload some first",
            {"most": limits.most},
        )
    taken = {limits.base_model, *adapters.loads}
    adapter = adapter_catalog.next_adapter(adapters.catalog, request, taken)
    times = adapters.times[adapter.adapter_id] = LoadTimes(begun=state.now)
    adapters.loads[adapter.name] = Load(adapter=adapter, times=times)
    # Durable before a replica learns of the id: one that keeps it over a restart must not meet another.
    _decide(state, adapter_catalog.numbered(adapters.catalog, adapter))
    _record(state, adapter, "loading")
    return adapter


def stage(state: State, adapter: Adapter, files: AdapterFiles) -> PendingCall:
    """The files are copied, not yet durable: `complete` or `fail` follows.

    The call's result is the live Adapter. On error (InvalidRequest: all replicas rejected it; Conflict: some
    did; FleetUnavailable: too few serve) no replica has it.
    """
    load = state.adapters.loads[adapter.name]
    load.adapter = replace(adapter, path=files.path, digest=files.digest, size_bytes=files.size_bytes)
    load.call, load.times.staged = PendingCall(name=LoadAdapter.name), state.now
    return load.call


def complete(state: State, adapter: Adapter) -> None:
    if (load := _load_of(state, adapter)) is not None:
        load.times.stored = state.now


def fail(state: State, adapter: Adapter, error: SlipstreamError) -> None:
    load = _load_of(state, adapter)
    if load is not None and not load.stored:
        load.error = load.error or error
        if load.call is None:
            _undo(state, load, load.error)


def unload(state: State, name: str) -> PendingCall:
    _check_enabled(state)
    _check_idle(state, name)
    out = adapter_catalog.named(state.adapters.catalog, name)
    ids = {each.adapter_id for each in out}
    _decide(state, adapter_catalog.without(state.adapters.catalog, ids))
    for each in out:
        _record(state, each, "retired")
    call = PendingCall(name=SetAdapters.name)
    state.adapters.unloads.append((ids, call))
    return call


def _load_of(state: State, adapter: Adapter) -> Load | None:
    load = state.adapters.loads.get(adapter.name)
    return load if load is not None and load.adapter.adapter_id == adapter.adapter_id else None


def _check_enabled(state: State) -> None:
    if state.adapter_limits.refusal is not None:
        raise Conflict(f"this fleet serves no adapters: {state.adapter_limits.refusal}")


def _check_idle(state: State, name: str) -> None:
    loads = state.adapters.loads.values()
    load = next((it for it in loads if name in (it.adapter.name, it.adapter.full_name)), None)
    if load is not None:
        raise Conflict(
            f"The lora adapter '{load.adapter.name}' is being loaded as version {load.adapter.version}: "
            "wait for its answer",
            {"lora_name": load.adapter.name, "version": load.adapter.version},
        )


def _decide(state: State, catalog: AdapterCatalog) -> None:
    state.adapters.catalog = catalog
    state.decide(Cataloged(catalog=catalog))


def _record(state: State, adapter: Adapter, phase: str, reason: str = "") -> None:
    state.record("adapter", lora_name=adapter.name, version=adapter.version, phase=phase, reason=reason)


def needed(state: State) -> set[int]:
    catalog = state.adapters.catalog
    pending = {load.adapter.adapter_id for load in state.adapters.loads.values()}
    return pending | {each.adapter_id for each in (*catalog.live, *catalog.retired)}


def settled(state: State, load_id: str) -> bool:
    adapters = state.adapters
    if any(load.adapter.load_id == load_id for load in adapters.loads.values()):
        return False
    found = next((each for each in adapters.catalog.live if each.load_id == load_id), None)
    return found is None or _is_everywhere(state, found)


def loaded(state: State, load_id: str) -> Adapter | None:
    catalog = state.adapters.catalog
    return next((each for each in (*catalog.live, *catalog.retired) if each.load_id == load_id), None)


def status(state: State) -> list[AdapterStatus]:
    catalog, members = state.adapters.catalog, list(state.members.values())
    loading = [load.adapter for load in state.adapters.loads.values() if not load.decided]
    return [
        _status(state, each, name, members)
        for adapters, name in ((catalog.retired, "retired"), (catalog.live, "live"), (loading, "loading"))
        for each in adapters
    ]


def _status(state: State, adapter: Adapter, name: str, members: list[Member]) -> AdapterStatus:
    adapter_id = adapter.adapter_id
    times = state.adapters.times.get(adapter_id)
    return AdapterStatus(
        name=adapter.name,
        version=adapter.version,
        state=name,
        path=adapter.path,
        digest=adapter.digest,
        size_bytes=adapter.size_bytes,
        replicas=tuple(each.replica_id for each in members if adapter_id in each.adapters.held),
        timings=None if times is None else times.timings(),
    )


def converged(state: State, member: Member) -> bool:
    return not member.has_queued(*KINDS) and _is_set(state, member)


def _is_set(state: State, member: Member) -> bool:
    live = tuple(each.adapter_id for each in state.adapters.catalog.live)
    return _is_told(state, member) and tuple(member.adapters.live) == live


def _is_told(state: State, member: Member) -> bool:
    return member.incarnation in state.adapters.told_live or not state.adapters.recovered


def _is_everywhere(state: State, adapter: Adapter) -> bool:
    everywhere = all(adapter.adapter_id in each.adapters.live for each in state.serving())
    return everywhere and not state.uncertain()


def advance(state: State) -> None:
    adapters = state.adapters
    if not adapters.catalog.last_id:
        return
    _converge_all(state)
    if _conclude(state):
        _converge_all(state)
    _answer(state)
    if adapters.catalog.retired and not state.returning() and (gone := _retired_nowhere(state)):
        _decide(state, adapter_catalog.without_retired(adapters.catalog, gone))
    if len(adapters.times) > len(adapters.loads) + len(adapters.catalog.live) + len(adapters.catalog.retired):
        kept = needed(state)
        adapters.times = {key: times for key, times in adapters.times.items() if key in kept}


def _converge_all(state: State) -> None:
    current, committing = state.round, set[Member]()
    if current is not None and current.phase is not RoundPhase.OPEN and current.hold:
        committing = set(current.participants)  # they wait for each other's COMMIT, or will soon
    for member in state.live():
        if not (member.loading or member.has_queued(*KINDS) or member in committing):
            _converge(state, member)


def _converge(state: State, member: Member) -> None:
    adapters, held = state.adapters, set(member.adapters.held)
    for adapter in adapters.catalog.live:
        if adapter.adapter_id not in held:
            _send(state, member, LoadAdapter(adapter=adapter), _restored)
            return
    keep = {each.adapter.adapter_id for each in adapters.loads.values() if each.wanted}
    superfluous = held - keep - {*member.adapters.live, *member.adapters.unloading}
    if superfluous or not _is_set(state, member):
        body = SetAdapters(live=tuple(adapters.catalog.live), keep=tuple(sorted(keep)))
        _send(state, member, body, _restored)
        return
    if member.state is MemberState.SERVING:
        for load in adapters.loads.values():
            if load.wanted and member.incarnation not in load.asked:
                load.asked.add(member.incarnation)
                _send(state, member, LoadAdapter(adapter=load.adapter), partial(_loaded, load=load))
                return


def _send(state: State, member: Member, body: Body, on_complete: OnComplete) -> None:
    membership.send(state, body.name, {member: body}, on_complete=on_complete)


def _restored(state: State, call: PendingCall) -> None:
    verdict = classify(call)
    membership.fence_each(state, verdict.not_done, call.name)
    if call.name == SetAdapters.name:
        members = (state.members.get(each) for each in verdict.done)
        state.adapters.told_live |= {each.incarnation for each in members if each is not None}


def _loaded(state: State, call: PendingCall, *, load: Load) -> None:
    verdict = classify(call)
    for replica_id, answer in call.answers.items():
        if isinstance(answer.value, LoadedAdapter):
            load.times.replicas[replica_id] = answer.value
    membership.fence_each(state, verdict.replica_failed, call.name)
    load.rejected |= {**verdict.rejected, **verdict.transfer_failed}
    for replica_id in verdict.done:
        member = state.members.get(replica_id)
        if member is not None and load.adapter.adapter_id not in member.adapters.held:
            membership.fence(state, member, f"{call.name}: done, and it does not hold it")


def _conclude(state: State) -> bool:
    """True if replicas have to be told something new."""
    changed = False
    for load in list(state.adapters.loads.values()):
        if load.call is None or load.decided or state.returning():
            continue
        if load.error is None:
            load.error = _fault(state, load)
            changed = changed or load.error is not None
        if load.error is not None:
            _undo(state, load, load.error)
        elif not load.rejected and all(
            load.adapter.adapter_id in each.adapters.held for each in state.serving()
        ):
            if load.times.held is None:
                load.times.held = state.now
            if load.stored:
                _make_live(state, load)
                changed = True
    return changed


def _fault(state: State, load: Load) -> SlipstreamError | None:
    adapter, serving, needed = load.adapter, state.serving(), max(1, state.needed)
    if load.rejected:
        if any(_asked_to_load(each, adapter.adapter_id) for each in state.live()):
            return None
        others = any(adapter.adapter_id in each.adapters.held for each in serving)
        kind = Conflict if others else InvalidRequest
        reasons = set(load.rejected.values())
        text = reasons.pop() if len(reasons) == 1 and not others else join_reasons(load.rejected)
        return kind(
            f"The lora adapter '{adapter.name}' is not loaded, on any replica: {text}",
            {"replicas": dict(load.rejected)},
        )
    if len(serving) < needed:
        return FleetUnavailable(
            f"The lora adapter '{adapter.name}' is not loaded: {len(serving)} replicas serve, and "
            f"{needed} are needed"
        )
    return None


def _make_live(state: State, load: Load) -> None:
    before = state.adapters.catalog.live
    _decide(state, adapter_catalog.with_live(state.adapters.catalog, load.adapter, state.adapter_limits.keep))
    load.decided = True
    _record(state, load.adapter, "live")
    for each in before:
        if each not in state.adapters.catalog.live:
            _record(state, each, "retired")


def _undo(state: State, load: Load, error: SlipstreamError) -> None:
    """Withdraw it; answer with the error once no replica has it, or may still get it."""
    adapter_id, remains = load.adapter.adapter_id, False
    for member in state.live():
        told = membership.withdraw(member, lambda body: _loads(body, adapter_id), delivered=False)
        remains = remains or told or adapter_id in member.adapters.held
    if remains:
        return
    del state.adapters.loads[load.adapter.name]
    _record(state, load.adapter, "failed", error.message)
    if load.call is not None:
        load.call.finish(error=error)


def _answer(state: State) -> None:
    """End loads and unloads that have reached all replicas that take requests."""
    if state.uncertain():
        return
    adapters = state.adapters
    for load in list(adapters.loads.values()):
        if load.decided and _is_everywhere(state, load.adapter):
            del adapters.loads[load.adapter.name]
            load.times.live = state.now
            if load.call is not None:
                load.call.finish(result=load.adapter)
    for ids, call in list(adapters.unloads):
        if not any(ids & _nameable(state, each) for each in state.serving()):
            adapters.unloads.remove((ids, call))
            call.finish(result=None)


def _nameable(state: State, member: Member) -> set[int]:
    """Ids that requests may name there now, or after the instructions that are queued."""
    if not _is_told(state, member):
        catalog = state.adapters.catalog
        return {each.adapter_id for each in (*catalog.live, *catalog.retired)}
    queued = (each.body.live for each in member.queue if isinstance(each.body, SetAdapters))
    return {*member.adapters.live, *(each.adapter_id for live in queued for each in live)}


def _retired_nowhere(state: State) -> set[int]:
    """Ids of retired adapters that no replica holds, or may still be loading."""
    ids, there = {each.adapter_id for each in state.adapters.catalog.retired}, set[int]()
    for member in state.members.values():
        there.update(member.adapters.held, member.adapters.live)
        there.update(each for each in ids if _asked_to_load(member, each))
    return ids - there


def _loads(body: Body, adapter_id: int) -> bool:
    return isinstance(body, LoadAdapter) and body.adapter.adapter_id == adapter_id


def _asked_to_load(member: Member, adapter_id: int) -> bool:
    return any(_loads(queued.body, adapter_id) for queued in member.queue)
