"""A round up to its decision: opened, filled, closed and verified, or aborted. No live weight is touched.

open ─► BEGIN ─► send* ─► RECEIVE ─► close ─► VERIFY ─► all equal ─► the decision to commit
  └──────────────── abort: publisher, lease, bad payload, broken transfer, too few replicas ─► DROP
"""

from typing import Any

from deployments.errors import (
    Conflict,
    FleetUnavailable,
    InvalidRequest,
    RoundAborted,
    TransferAborted,
    SlipstreamError,
)
from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.connection import Connection, payload_of
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, MemberState, Task
from deployments.ledger.round import Round, RoundPhase
from deployments.ledger.verdict import digest_minority, judge, sentence
from deployments.ledger.version_state import RoundBook
from deployments.protocol import CommitMode, InstructionKind, Manifest, RoundOptions

STAGING_KINDS = (InstructionKind.BEGIN, InstructionKind.RECEIVE, InstructionKind.VERIFY)


class StagingPhase:
    def __init__(self, fleet: Fleet, book: RoundBook, commit_phase: CommitPhase) -> None:
        self._fleet = fleet
        self._book = book
        self._commit_phase = commit_phase

    def open(
        self, manifest: Manifest | None, options: RoundOptions, connection: Connection | None, now: float
    ) -> Task:
        """Everyone alive takes part, joiners too: a round carries whole weights, so any base will do."""
        members = self._eligible(connection)
        config = self._fleet.config
        current = Round(
            round_id=self._book.new_round_id(),
            version=self._book.committed_version + 1,
            label=options.label,
            epoch=self._fleet.epoch,
            opened=now,
            participants=tuple(members),
            connection=connection,
            manifest=manifest,
            commit=config.commit if options.commit is None else options.commit,
            kv_cache=config.kv_cache if options.kv_cache is None else options.kv_cache,
            in_flight=config.in_flight if options.in_flight is None else options.in_flight,
            persist=options.persist,
        )
        self._book.current = current
        self._book.enter(current, RoundPhase.OPEN, now)
        for member in members:
            self._fleet.withdraw(member, [InstructionKind.CATCH_UP], sent=False)
        begin = {
            "keep": current.version if current.persist else None,
            "kv_cache": current.kv_cache.value,
            "in_flight": current.in_flight.value,
        }
        parts = {name: {each.replica_id: value for each in members} for name, value in begin.items()}
        task = self._ask(current, InstructionKind.BEGIN, parts, now)
        task.result = current.round_id
        return task

    def send(self, round_id: int, payload: Any, now: float) -> Task:
        current = self._open_round(round_id)
        parts = payload_of(payload, current.participants)
        return self._ask(current, InstructionKind.RECEIVE, {"payload": parts}, now)

    def close(self, round_id: int, manifest: Manifest | None, label: str | None, now: float) -> Task:
        current = self._open_round(round_id)
        if manifest is not None:
            check_same_tensors(current.manifest, manifest)
            current.manifest = manifest
        if label is not None:
            current.label = label
        current.close = Task(kind="close_round", round_id=round_id)
        self._book.enter(current, RoundPhase.VERIFYING, now)
        encoded = None if current.manifest is None else encode_manifest(current.manifest)
        parts = {member.replica_id: encoded for member in current.participants}
        self._ask(current, InstructionKind.VERIFY, {"manifest": parts}, now)
        return current.close

    def abort(self, current: Round, error: SlipstreamError, now: float) -> None:
        """The fleet goes on serving what it served. Those who may hold staged bytes drop them."""
        self._book.abort(current, error, now)
        for member in current.remaining():
            self._fleet.withdraw(member, STAGING_KINDS, sent=True)
            self.drop(member, current.round_id, now)

    def drop(self, member: Member, round_id: int, now: float) -> None:
        if not member.has_order(InstructionKind.DROP):
            args = {member.replica_id: {"round_id": round_id}}
            self._fleet.ask(InstructionKind.DROP, args, now, then=self._dropped)

    def _dropped(self, task: Task, now: float) -> None:
        """Who cannot say that its live weights are as they were is not trusted any more."""
        self._fleet.fence_each(judge(task).all_wrong, "drop", now)

    def check_quorum(self, now: float) -> None:
        """A round that lost too many members ends here, and one whose members cannot receive the rest."""
        current = self._book.current
        if current is None or current.decided:
            return
        receiving = self._receiving_together(current)
        if receiving is not None:  # not only when the last has answered: the others wait for the broken one
            self._fleet.fence_each(judge(receiving).failed, InstructionKind.RECEIVE, now)
        remaining, needed = current.remaining(), self._fleet.config.min_replicas
        left = {member.replica_id: member.reason for member in current.participants if member.out}
        if len(remaining) >= needed:
            if left and receiving is not None:
                self.abort(current, transfer_broke(current, left), now)
            return
        self.abort(
            current,
            RoundAborted(
                f"round {current.round_id} aborted: {len(remaining)} of {len(current.participants)} replicas "
                f"remain, at least {needed} must: {sentence(left)}",
                {"round_id": current.round_id, "remaining": len(remaining), "min_replicas": needed,
                 "replicas": left},
            ),
            now,
        )  # fmt: skip

    def _receiving_together(self, current: Round) -> Task | None:
        """The errand of those who still receive over a communicator, which is of no use without a member."""
        if current.connection is None or not current.connection.collective:
            return None
        return next(
            (
                task
                for task in self._fleet.tasks
                if task.kind == InstructionKind.RECEIVE and task.round_id == current.round_id
            ),
            None,
        )

    def _eligible(self, connection: Connection | None) -> list[Member]:
        current = self._book.current
        if current is not None:
            raise Conflict(
                f"round {current.round_id} is {current.phase}: close or abort it before opening another",
                {"round_id": current.round_id, "phase": current.phase.value},
            )
        self._check_returned()
        members, needed = self._fleet.live(), self._fleet.config.min_replicas
        if len(members) < needed:
            raise FleetUnavailable(
                f"a round needs at least {needed} replicas, {len(members)} are registered",
                {"expected": needed, "actual": len(members)},
            )
        if connection is None:
            reason = "connect before opening a round: no publisher is connected"
            raise Conflict(reason, {"connect_again": True})
        connection.check_members(members)
        return members

    def _check_returned(self) -> None:
        """After a restart: a round without those that still serve would leave them behind."""
        absent = [
            each.replica_id for each in self._fleet.members.values() if each.state is MemberState.RETURNING
        ]
        if absent:
            raise FleetUnavailable(
                f"the controller restarted and has not heard of {absent} yet; try again",
                {"replicas": absent},
            )

    def _open_round(self, round_id: int) -> Round:
        current = self._book.undecided(round_id)
        if current.phase is not RoundPhase.OPEN:
            raise Conflict(f"round {round_id} is {current.phase}, expected open", {"round_id": round_id})
        return current

    def _ask(
        self, current: Round, kind: InstructionKind, parts: dict[str, dict[str, Any]], now: float
    ) -> Task:
        """`parts` are arguments that differ by member: name -> replica id -> value."""
        args = {
            member.replica_id: {
                "round_id": current.round_id,
                **{name: values[member.replica_id] for name, values in parts.items()},
            }
            for member in current.remaining()
        }
        return self._fleet.ask(kind, args, now, then=self._answered, round_id=current.round_id)

    def _answered(self, task: Task, now: float) -> None:
        current = self._book.current
        if current is None or current.round_id != task.round_id or current.decided:
            return  # it ended before the last answer came
        current.note(task)
        verdict = judge(task)
        self._fleet.fence_each(verdict.to_fence, task.kind, now)
        if verdict.publisher_at_fault:
            error = publisher_error(current, task, dict(verdict.rejected))
            task.finish(error=error)  # it is no longer among the fleet's tasks, which the abort ends
            self.abort(current, error, now)
        elif verdict.broken:
            broke = transfer_broke(current, {**task.absent, **verdict.broken})
            task.finish(error=broke)
            self.abort(current, broke, now)
        elif task.kind == InstructionKind.VERIFY:
            self._compare(current, task, now)

    def _compare(self, current: Round, task: Task, now: float) -> None:
        digests = {
            member.replica_id: str(current.values.get(member.replica_id, {}).get("digest"))
            for member in current.remaining()
            if member.replica_id in task.answers
        }
        minority = digest_minority(digests)
        if minority is None:
            reason = f"round {current.round_id} aborted: replicas disagree, no majority: {sentence(digests)}"
            self.abort(current, RoundAborted(reason, {"replicas": digests}), now)
            return
        self._fleet.fence_each(minority, "verify", now)
        self._book.enter(current, RoundPhase.VERIFIED, now)

    def decide(self, now: float) -> None:
        """Commit what is verified. Together means that nobody may still serve the old version behind our
        back, so the decision waits until each that was fenced knows it; meanwhile the fleet serves on."""
        current = self._book.current
        if current is None or current.phase is not RoundPhase.VERIFIED:
            return
        if current.commit is CommitMode.ROLLING or not self._fleet.uncertain():
            self._commit_phase.decide(current, now)


def publisher_error(current: Round, task: Task, rejected: dict[str, str]) -> InvalidRequest:
    return InvalidRequest(
        f"round {current.round_id} aborted: every replica rejected {task.kind}: {sentence(rejected)}",
        {"round_id": current.round_id, "phase": task.kind, "replicas": rejected},
    )


def transfer_broke(current: Round, replicas: dict[str, str]) -> TransferAborted:
    return TransferAborted(
        f"round {current.round_id} aborted: the transfer broke; connect again, and send the round again: "
        f"{sentence(replicas)}",
        {"round_id": current.round_id, "send_again": True, "replicas": replicas},
    )


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        "tensors": {
            name: {"dtype": spec.dtype, "shape": list(spec.shape), "digest": spec.digest}
            for name, spec in manifest.tensors.items()
        }
    }


def check_same_tensors(opened: Manifest | None, closed: Manifest) -> None:
    """Only digests may be new at the close: the replicas planned with what was announced."""
    if opened is None:
        return
    wrong = [
        f"{name}: announced {_form(opened, name)}, closed with {_form(closed, name)}"
        for name in sorted({*opened.tensors, *closed.tensors})
        if _form(opened, name) != _form(closed, name)
    ]
    if wrong:
        raise InvalidRequest(
            f"{len(wrong)} tensors differ from those the round was opened with, first: {wrong[0]}",
            {"tensors": wrong[:100]},
        )


def _form(manifest: Manifest, name: str) -> str:
    spec = manifest.tensors.get(name)
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"
