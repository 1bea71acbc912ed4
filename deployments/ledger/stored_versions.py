"""Versions in the store: what replicas write, and which joiners cannot load.

    RECEIVE(retain_version) ─► every replica retains what it receives ─► COMMIT(keep) ─► the one of them that
    gets the store's lock writes ─► its report says stored, or why not

Writing is off the critical path. A joiner locks what it loads, against removal by the controller.
"""

from deployments.ledger.decisions import Stored
from deployments.ledger.state import Member, MemberState, Refusal, State
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.poll import Report, StoreResult

RETRY_S = 30.0  # then a replica may be able to load the version


def set_stored(state: State, version: int, path: str, label: str | None) -> None:
    """Raises InvalidRequest for a version never committed."""
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
    member.retained_version = report.retained_version
    result, before = report.store_result, member.store_result
    if result is None or result == before or result.version > state.committed_version:
        return False
    if result.problem:
        if result.version == state.unstored and not _failed(state, result.version):
            state.record("not_stored", version=result.version, reason=_why(member, result))
        member.store_result = result
        return False
    member.store_result = result
    newer = result.version > state.stored_version
    if newer:
        set_stored(state, result.version, result.path, result.label)
    return newer


def _failed(state: State, version: int) -> list[str]:
    """Why replicas failed to write a version, which they retry."""
    found = ((each, each.store_result) for each in state.live())
    failed = [(each, result) for each, result in found if result is not None and result.version == version]
    return [_why(each, result) for each, result in failed if result.problem]


def _why(member: Member, result: StoreResult) -> str:
    return f"{member.replica_id}: {result.problem}"


def _not_stored(version: int, why: str) -> str:
    return f"version {version} is not in the store: {why}"


def set_unstored(state: State, version: int, reason: str) -> None:
    if version == state.committed_version != state.stored_version:
        state.unwritten = version, reason
        state.record("not_stored", version=version, reason=reason)


def problem(state: State) -> str | None:
    committed = state.committed_version
    if (version := state.unstored) is not None:
        if failed := _failed(state, version):
            return _not_stored(version, "; ".join(sorted(failed)))
        settled = not state.returning() and not (state.round is not None and state.round.decided)
        if settled and all(each.retained_version != version for each in state.live()):
            return _not_stored(version, "no replica retains its tensors")
    for each in state.refusals.values():
        if each.version == committed != 0:
            return f"{each.replica_id} cannot load version {each.version} from the store: {each.reason}"
    if state.unwritten is not None and state.unwritten[0] == committed != state.stored_version:
        return _not_stored(*state.unwritten)
    return None


def refuse(state: State, replica_id: str, incarnation: str, version: int, reason: str) -> None:
    before = state.refusals.get(incarnation)
    state.refusals[incarnation] = Refusal(
        replica_id=replica_id, version=version, reason=reason, since=state.now
    )
    if before is None or (before.version, before.reason) != (version, reason):
        event = "unloadable" if version else "refused"  # version 0 is in no store
        state.record(event, replica=replica_id, version=version, reason=reason)


def refused(state: State, incarnation: str, version: int) -> bool:
    refusal = state.refusals.get(incarnation)
    return refusal is not None and refusal.version == version


def advance_refusals(state: State) -> None:
    for incarnation, refusal in list(state.refusals.items()):
        member = state.find(refusal.replica_id, incarnation)
        serves = member is not None and member.state is MemberState.SERVING
        lapsed = state.now - refusal.since >= RETRY_S
        if serves or lapsed or _is_gone(state, refusal.replica_id, incarnation):
            del state.refusals[incarnation]


def _is_gone(state: State, replica_id: str, incarnation: str) -> bool:
    member = state.members.get(replica_id)
    return incarnation in state.fences or (member is not None and member.incarnation != incarnation)
