"""How an adapter becomes live on all replicas or on none, and how it is retired.

    caller    begin ─► (the shell copies the files) ─► stage ─► PendingCall
    replicas  LOAD_ADAPTER ─► all serving ones hold it ─► decision, durable ─► SET_ADAPTERS ─► answer
              one rejects it ─► SET_ADAPTERS without it ─► the caller's error

After each event every replica is compared with the catalog and sent what it lacks first: an adapter, or the
news of a change. Changes are numbered. A caller has its answer once each replica that takes requests has
carried out its change; one that has carried out none may still run an earlier controller's directive.

Nothing is loaded between the decision and the end of a round that holds: a load ahead of one COMMIT would
stop the whole fleet.

Numbers and ids are never reused: an engine finds KV cache blocks by the adapter's full name.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.ledger import membership
from deployments.ledger.decisions import Cataloged
from deployments.ledger.state import (
    Load,
    Member,
    MemberState,
    PendingCall,
    RoundPhase,
    State,
    classify,
    join_reasons,
)
from deployments.protocol.adapters import (
    MAX_NAME,
    SEPARATOR,
    Adapter,
    AdapterCatalog,
    AdapterFiles,
    AdapterStatus,
    AdapterTimings,
    LoadAdapter,
    LoadedAdapter,
    LoadRequest,
    SetAdapters,
    is_name,
)
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound, SlipstreamError
from deployments.protocol.poll import Body

KINDS = (LoadAdapter, SetAdapters)
REMEMBERED = 256  # names with a known last number; older names share the greatest of theirs


def begin(state: State, request: LoadRequest) -> Adapter:
    adapters, limits = state.adapters, state.adapter_limits
    _check_enabled(state)
    _check_idle(state, request.name)
    check_new(adapters.catalog, request, limits.base_model)
    if len(adapters.catalog.live) + len(adapters.loads) >= limits.most:
        raise Conflict(
            f"{limits.most} versions of adapters are live or being loaded, which is the limit: "
            "unload some first",
            {"most": limits.most},
        )
    taken = {limits.base_model, *adapters.loads}
    adapter = next_adapter(adapters.catalog, request, taken)
    adapters.loads[adapter.name] = load = Load(adapter=adapter, begun=state.now)
    _time(state, load)
    # Durable before a replica learns of the id: one that keeps it over a restart must not meet another.
    _decide(state, numbered(adapters.catalog, adapter))
    _record(state, adapter, "loading")
    return adapter


def stage(state: State, adapter: Adapter, files: AdapterFiles) -> PendingCall:
    """The files are copied but not durable: call `complete` or `fail` next.

    The call's result is the live Adapter. On error (InvalidRequest: all replicas rejected it; Conflict: some
    did; FleetUnavailable: too few serve) no replica has it.
    """
    load = state.adapters.loads[adapter.name]
    load.adapter = replace(adapter, path=files.path, digest=files.digest, size_bytes=files.size_bytes)
    load.call, load.staged = PendingCall(name=LoadAdapter.name), state.now
    _time(state, load, copy_s=state.now - load.begun)
    return load.call


def complete(state: State, adapter: Adapter) -> None:
    if (load := _load_of(state, adapter)) is not None:
        load.stored = True
        _time(state, load, sync_s=state.now - load.staged)


def fail(state: State, adapter: Adapter, error: SlipstreamError) -> None:
    load = _load_of(state, adapter)
    if load is not None and not load.stored:
        _undo(state, load, load.error or error)


def unload(state: State, name: str) -> PendingCall:
    _check_enabled(state)
    _check_idle(state, name)
    out = named(state.adapters.catalog, name)
    ids = {each.adapter_id for each in out}
    number = _decide(state, without(state.adapters.catalog, ids))
    call = PendingCall(name=SetAdapters.name)
    state.adapters.decided.append((number, call, None))
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


def _decide(state: State, catalog: AdapterCatalog) -> int:
    """Returns the change's number, announced to replicas if other versions are live."""
    adapters, before = state.adapters, state.adapters.catalog
    adapters.catalog = catalog
    state.decide(Cataloged(catalog=catalog))
    adapters.number += catalog.live != before.live
    for phase, now, then in (
        ("live", catalog.live, before.live),
        ("retired", catalog.retired, before.retired),
    ):
        known = {each.adapter_id for each in then}
        for each in (each for each in now if each.adapter_id not in known):
            _record(state, each, phase)
    return adapters.number


def _time(state: State, load: Load, **timings: Any) -> None:
    by_id, adapter_id = state.adapters.timings, load.adapter.adapter_id
    by_id[adapter_id] = replace(by_id.get(adapter_id, AdapterTimings()), **timings)


def _record(state: State, adapter: Adapter, phase: str, reason: str = "") -> None:
    state.record("adapter", lora_name=adapter.name, version=adapter.version, phase=phase, reason=reason)


def needed(state: State) -> set[int]:
    catalog = state.adapters.catalog
    pending = {load.adapter.adapter_id for load in state.adapters.loads.values()}
    return pending | {each.adapter_id for each in (*catalog.live, *catalog.retired)}


def settled(state: State, load_id: str) -> bool:
    adapters = state.adapters
    loads = (*adapters.loads.values(), *(load for _, _, load in adapters.decided if load is not None))
    if any(load.adapter.load_id == load_id for load in loads):
        return False
    found = any(each.load_id == load_id for each in adapters.catalog.live)
    return not found or _carried_out(state) > 0


def loaded(state: State, load_id: str) -> Adapter | None:
    catalog = state.adapters.catalog
    return next((each for each in (*catalog.live, *catalog.retired) if each.load_id == load_id), None)


def status(state: State) -> list[AdapterStatus]:
    catalog, members = state.adapters.catalog, list(state.members.values())
    loading = [load.adapter for load in state.adapters.loads.values()]
    return [
        _status(state, each, name, members)
        for adapters, name in ((catalog.retired, "retired"), (catalog.live, "live"), (loading, "loading"))
        for each in adapters
    ]


def _status(state: State, adapter: Adapter, name: str, members: list[Member]) -> AdapterStatus:
    return AdapterStatus(
        name=adapter.name,
        version=adapter.version,
        state=name,
        path=adapter.path,
        digest=adapter.digest,
        size_bytes=adapter.size_bytes,
        replicas=tuple(each.replica_id for each in members if adapter.adapter_id in each.adapters),
        timings=state.adapters.timings.get(adapter.adapter_id),
    )


def _carried_out(state: State) -> int:
    """The newest change that every replica that takes requests has carried out."""
    if state.uncertain():
        return -1
    return min((each.adapters_number for each in state.serving()), default=state.adapters.number)


def advance(state: State) -> None:
    adapters = state.adapters
    if not adapters.catalog.last_id:
        return
    _converge_all(state)
    number = adapters.number
    _conclude(state)
    if adapters.number != number:
        _converge_all(state)
    _answer(state)
    if adapters.catalog.retired and not state.returning() and (gone := _retired_nowhere(state)):
        _decide(state, without_retired(adapters.catalog, gone))
    kept = needed(state)
    if len(adapters.timings) > len(kept):
        adapters.timings = {key: each for key, each in adapters.timings.items() if key in kept}


def _converge_all(state: State) -> None:
    current, committing = state.round, set[Member]()
    if current is not None and current.phase is not RoundPhase.OPEN and current.hold:
        committing = set(current.participants)  # they wait for each other's COMMIT, or will soon
    for member in state.live():
        if not (member.loading or member.has_queued(*KINDS) or member in committing):
            _converge(state, member)


def _converge(state: State, member: Member) -> None:
    adapters = state.adapters
    wanted = [load.adapter for load in adapters.loads.values() if load.wanted]
    is_behind = member.adapters_number != adapters.number
    lacking = None
    if is_behind or member.state is MemberState.SERVING:
        held = set(member.adapters)
        needed = adapters.catalog.live if is_behind else wanted
        lacking = next((each for each in needed if each.adapter_id not in held), None)
    if lacking is not None:
        on_loaded = partial(_loaded, member=member, adapter=lacking)
        membership.send(
            state, LoadAdapter.name, {member: LoadAdapter(adapter=lacking)}, on_complete=on_loaded
        )
    elif is_behind:
        keep = tuple(sorted(each.adapter_id for each in wanted))
        body = SetAdapters(live=tuple(adapters.catalog.live), keep=keep)
        on_set = partial(_set, member=member, number=adapters.number)
        membership.send(state, body.name, {member: body}, on_complete=on_set)


def _set(state: State, call: PendingCall, *, member: Member, number: int) -> None:
    membership.fence_each(state, classify(call).not_done, call.name)
    member.adapters_number = number


def _loaded(state: State, call: PendingCall, *, member: Member, adapter: Adapter) -> None:
    verdict, load = classify(call), _load_of(state, adapter)
    if load is None:  # it is live: a replica without it cannot serve
        membership.fence_each(state, verdict.not_done, call.name)
        return
    for replica_id, answer in call.answers.items():
        if isinstance(answer.value, LoadedAdapter):
            known = state.adapters.timings[adapter.adapter_id].replicas
            _time(state, load, replicas={**known, replica_id: answer.value})
    membership.fence_each(state, verdict.replica_failed, call.name)
    load.rejected |= {**verdict.rejected, **verdict.transfer_failed}
    if verdict.done and adapter.adapter_id not in member.adapters:
        membership.fence(state, member, f"{call.name}: done, and it does not hold it")


def _conclude(state: State) -> None:
    for load in list(state.adapters.loads.values()):
        if load.call is None or state.returning():
            continue
        error = load.error or _fault(state, load)
        if error is not None:
            _undo(state, load, error)
        elif load.wanted and all(load.adapter.adapter_id in each.adapters for each in state.serving()):
            if state.adapters.timings[load.adapter.adapter_id].load_s is None:
                _time(state, load, load_s=state.now - load.staged)
            if load.stored:
                keep = state.adapter_limits.keep
                catalog = with_live(state.adapters.catalog, load.adapter, keep)
                state.adapters.decided.append((_decide(state, catalog), load.call, load))
                del state.adapters.loads[load.adapter.name]


def _fault(state: State, load: Load) -> SlipstreamError | None:
    adapter, serving, needed = load.adapter, state.serving(), max(1, state.needed)
    if load.rejected:
        if any(_asked_to_load(each, adapter.adapter_id) for each in state.live()):
            return None
        others = any(adapter.adapter_id in each.adapters for each in serving)
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


def _undo(state: State, load: Load, error: SlipstreamError) -> None:
    """Answer with the error once no replica has it, or may still get it."""
    if load.error is None:
        load.error = error
        if load.call is not None:  # a replica may have it
            state.adapters.number += 1
    adapter_id, remains = load.adapter.adapter_id, False
    for member in state.live():
        told = membership.withdraw(member, lambda body: _loads(body, adapter_id), delivered=False)
        remains = remains or told or adapter_id in member.adapters
    if remains:
        return
    del state.adapters.loads[load.adapter.name]
    _record(state, load.adapter, "failed", error.message)
    if load.call is not None:
        load.call.finish(error=error)


def _answer(state: State) -> None:
    """Loads and unloads that have reached all replicas that take requests."""
    carried_out = _carried_out(state)
    for number, call, load in state.adapters.decided:
        if number <= carried_out:
            call.finish(result=None if load is None else load.adapter)
            if load is not None:
                _time(state, load, total_s=state.now - load.begun)
    state.adapters.decided = [each for each in state.adapters.decided if each[0] > carried_out]


def _retired_nowhere(state: State) -> set[int]:
    """Retired adapters that no replica holds or may be loading."""
    members = state.members.values()
    held = {adapter_id for member in members for adapter_id in member.adapters}
    gone = {each.adapter_id for each in state.adapters.catalog.retired} - held
    return {each for each in gone if not any(_asked_to_load(member, each) for member in members)}


def _loads(body: Body, adapter_id: int) -> bool:
    return isinstance(body, LoadAdapter) and body.adapter.adapter_id == adapter_id


def _asked_to_load(member: Member, adapter_id: int) -> bool:
    return any(_loads(queued.body, adapter_id) for queued in member.queue)


def check_new(catalog: AdapterCatalog, request: LoadRequest, base_model: str) -> None:
    """Refuses only names that would stand for two adapters: clients may number names themselves (ART loads
    `run@7`).

    Raises:
        InvalidRequest: no such name is possible, or it is live and `in_place` is false.
        Conflict: the newest live version is not `after`.
    """
    name, after = request.name, request.after
    if not is_name(name):
        raise InvalidRequest(f"lora_name: expected 1 to {MAX_NAME} printable characters, got {name[:60]!r}")
    if name == base_model:
        raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
    found = next((each for each in catalog.live if each.full_name == name), None)
    if found is not None:
        raise InvalidRequest(
            f"The lora adapter '{name}' is version {found.version} of '{found.name}', which does not change: "
            f"load '{found.name}', or another name",
            {"lora_name": name},
        )
    newest = max((each.version for each in catalog.live if each.name == name), default=0)
    if newest and not request.in_place:
        raise InvalidRequest(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
            "place, set 'load_inplace' to True.",
            {"lora_name": name},
        )
    if after is not None and newest != after:
        raise Conflict(
            f"The lora adapter '{name}' is at version {newest}, expected {after}: somebody has changed it",
            {"lora_name": name, "version": newest, "expected": after},
        )


def named(catalog: AdapterCatalog, name: str) -> list[Adapter]:
    """A name's live versions, oldest first; a full name's one version. Raises NotFound."""
    found = [each for each in catalog.live if name in (each.name, each.full_name)]
    if not found:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", {"lora_name": name})
    return found


def next_adapter(catalog: AdapterCatalog, request: LoadRequest, taken: Collection[str] = ()) -> Adapter:
    """The next version, without files; `taken`: names that its full name cannot be."""
    name, others = request.name, {*taken, *(each.name for each in catalog.live)}
    version = catalog.last_versions.get(name, catalog.floor) + 1
    while f"{name}{SEPARATOR}{version}" in others:
        version += 1
    return Adapter(
        name=name,
        version=version,
        adapter_id=catalog.last_id + 1,
        path="",
        digest="",
        size_bytes=0,
        is_3d=request.is_3d,
        load_id=request.load_id,
    )


def numbered(catalog: AdapterCatalog, adapter: Adapter) -> AdapterCatalog:
    last = {name: number for name, number in catalog.last_versions.items() if name != adapter.name}
    last[adapter.name] = adapter.version
    floor = catalog.floor
    while len(last) > REMEMBERED:
        floor = max(floor, last.pop(next(iter(last))))
    return replace(catalog, last_id=max(catalog.last_id, adapter.adapter_id), last_versions=last, floor=floor)


def with_live(catalog: AdapterCatalog, adapter: Adapter, keep: int) -> AdapterCatalog:
    own = [each for each in catalog.live if each.name == adapter.name]
    out = {each.adapter_id for each in own[: max(0, len(own) + 1 - keep)]}
    return without(replace(catalog, live=(*catalog.live, adapter)), out)


def without(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    return replace(
        catalog,
        live=tuple(each for each in catalog.live if each.adapter_id not in ids),
        retired=(*catalog.retired, *(each for each in catalog.live if each.adapter_id in ids)),
    )


def without_retired(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    return replace(catalog, retired=tuple(each for each in catalog.retired if each.adapter_id not in ids))
