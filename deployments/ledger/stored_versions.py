"""Versions in the store: which replica writes one, and which joiners cannot load.

    RECEIVE(retain_version) ─► every replica retains what it receives ─► committed ─► STORE to one of them
    its report says stored ─► FORGET to all; or a problem, or it is gone ─► STORE to another one
    none could, or the writer is late ─► the status says so; another attempt every `RETRY_S`

Writing is off the critical path: STORE is acknowledged when the write begins. Reports say what a replica
retains, so a restarted controller continues. A joiner locks what it loads, which the controller then does not
remove.
"""

from deployments.ledger import membership
from deployments.ledger.decisions import Stored
from deployments.ledger.state import (
    Member,
    MemberState,
    PendingCall,
    Refusal,
    State,
    StoreWrite,
    classify,
    join_reasons,
)
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.poll import Forget, Report, WriteVersion

RETRY_S = 30.0  # to write a version that none could, or to load one that a replica could not


def advance(state: State) -> None:
    _advance_refusals(state)
    _advance_write(state)


# -- who writes -------------------------------------------------------------------------------


def set_stored(state: State, version: int, path: str, label: str | None) -> None:
    """A version is complete on disk. Raises InvalidRequest for one never committed."""
    committed = state.committed_version
    if not 0 <= version <= committed:
        raise InvalidRequest(
            f"version: expected at most the committed version {committed}, got {version}",
            {"expected": committed, "actual": version},
        )
    stored = Stored(version=version, path=path, label=label)
    if stored == state.stored:
        return  # it was found on the disk before its writer's report
    if state.stored is None or version >= state.stored.version:
        state.stored = stored
        state.decide(stored)
    state.record("stored", version=version, path=path, label=label)


def on_report(state: State, member: Member, report: Report) -> bool:
    """Take in what a member retains, and how its last write ended. True if something may follow."""
    before, member.retained_version = member.retained_version, report.retained_version
    result = report.store_result
    if result is not None and result.version <= state.committed_version:
        writes = member is state.store_write.writer and not member.has_queued(WriteVersion)
        if result.problem and writes:  # else it is of an earlier attempt
            if _record_failure(state, result.version, member, result.problem):
                return True
        elif not result.problem and (state.stored is None or result.version > state.stored.version):
            set_stored(state, result.version, result.path, result.label)
            return True
    return member.retained_version != before and _concerns(state, member)


def _concerns(state: State, member: Member) -> bool:
    """Whether what it retains can be freed, or written now."""
    retained = member.retained_version
    if retained is None:
        return False
    committing = state.round is not None and state.round.decided  # its end looks at all members
    return retained <= state.stored_version or (retained == state.unstored and not committing)


def _record_failure(state: State, version: int, member: Member, reason: str) -> bool:
    write = state.store_write
    if version != write.version or write.failed.get(member.replica_id) == reason:
        return False
    write.failed[member.replica_id] = reason
    return True


def _advance_write(state: State) -> None:
    _forget_stored(state)
    version = state.unstored if state.store_dir is not None else None
    if version is None or version != state.store_write.version:
        state.store_write = StoreWrite(version=state.committed_version)
    if version is None:
        return
    write = state.store_write
    if (writer := write.writer) is not None and writer.alive and writer.replica_id not in write.failed:
        if state.now <= write.due:
            return
        # Its version still counts if it ends late. Two may write at once: each has a directory of its own.
        write.failed[writer.replica_id] = f"did not end within {state.config.store_timeout_s:g} s"
    write.writer = None
    if state.round is not None and state.round.decided:
        return
    if write.retry_at is not None and state.now >= write.retry_at:
        write.failed, write.retry_at = {}, None
    if write.retry_at is None:
        _assign(state, write)


def _assign(state: State, write: StoreWrite) -> None:
    if state.returning():
        return  # one that has not polled since a restart may retain it
    candidates = (
        each
        for each in state.live()
        if each.retained_version == write.version and each.replica_id not in write.failed
    )
    write.writer = next(candidates, None)
    if write.writer is None:
        _give_up(state, write)
        return
    write.due = state.now + state.config.store_timeout_s
    assert state.store_dir is not None
    body = WriteVersion(
        version=write.version,
        label=state.label,
        directory=state.store_dir,
        fleet_id=state.fleet_id,
        digest=state.digest_of(write.version),
    )
    call = membership.send(state, WriteVersion.name, {write.writer: body}, on_complete=_begun)
    call.result = write.version


def _begun(state: State, call: PendingCall) -> None:
    for replica_id, reason in classify(call).not_done.items():
        if (member := state.members.get(replica_id)) is not None:
            _record_failure(state, call.result, member, reason)


def _give_up(state: State, write: StoreWrite) -> None:
    why = join_reasons(dict(sorted(write.failed.items()))) or "no replica retains its tensors"
    before, write.problem = write.problem, _not_stored(write.version, why)
    write.retry_at = state.now + RETRY_S
    if write.problem != before:
        state.record("not_stored", version=write.version, reason=why)


def _not_stored(version: int, why: str) -> str:
    return f"version {version} is not in the store: {why}"


def _forget_stored(state: State) -> None:
    for member in state.live():
        retained = member.retained_version
        if retained is None or retained > state.stored_version:
            continue
        # It may have been told to forget an older one while it took part in a round.
        bodies = (queued.body for queued in member.queue)
        if not any(isinstance(body, Forget) and body.version >= retained for body in bodies):
            membership.queue(state, member, Forget(version=retained))


def set_unstored(state: State, version: int, reason: str) -> None:
    if version == state.committed_version != state.stored_version:
        state.unwritten = version, reason
        state.record("not_stored", version=version, reason=reason)


def problem(state: State) -> str | None:
    committed = state.committed_version
    if state.store_write.problem is not None:
        return state.store_write.problem
    for each in state.refusals.values():
        if each.version == committed != 0:
            return f"{each.replica_id} cannot load version {each.version} from the store: {each.reason}"
    if state.unwritten is not None and state.unwritten[0] == committed != state.stored_version:
        return _not_stored(*state.unwritten)
    return None


# -- what joiners cannot load ------------------------------------------------------------------


def refuse(state: State, replica_id: str, incarnation: str, version: int, reason: str) -> None:
    """This process cannot load a version."""
    before = state.refusals.get(incarnation)
    state.refusals[incarnation] = Refusal(
        replica_id=replica_id, version=version, reason=reason, since=state.now
    )
    if before is None or (before.version, before.reason) != (version, reason):
        event = "unloadable" if version else "refused"  # version 0 is in no store
        state.record(event, replica=replica_id, version=version, reason=reason)


def refused(state: State, incarnation: str, version: int) -> bool:
    """Whether this process could not load this version; it may have become able to after `RETRY_S`."""
    refusal = state.refusals.get(incarnation)
    return refusal is not None and refusal.version == version


def _advance_refusals(state: State) -> None:
    for incarnation, refusal in list(state.refusals.items()):
        member = state.find(refusal.replica_id, incarnation)
        serves = member is not None and member.state is MemberState.SERVING
        lapsed = state.now - refusal.since >= RETRY_S
        if serves or lapsed or _is_gone(state, refusal.replica_id, incarnation):
            del state.refusals[incarnation]


def _is_gone(state: State, replica_id: str, incarnation: str) -> bool:
    member = state.members.get(replica_id)
    return incarnation in state.fences or (member is not None and member.incarnation != incarnation)
