"""Making, keeping and dropping the publisher's connection: who was told to connect, and who could."""

from collections.abc import Mapping
from typing import Any

from deployments.errors import Conflict, FleetUnavailable, InvalidRequest
from deployments.ledger.connection import Connection, check_world_size
from deployments.ledger.fleet import Fleet
from deployments.ledger.members import Member, Task
from deployments.ledger.verdict import judge, sentence
from deployments.protocol import InstructionKind


class Connections:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._made = 0
        self._meeting: Task | None = None
        self.current: Connection | None = None

    def connect(self, publisher: str, init_info: Mapping[str, Any], now: float) -> Task:
        """Every member, each with its own rank offset. The task's result is the connection's id."""
        members = self._fleet.live()
        if not members:
            raise FleetUnavailable("no replica is registered to connect to", {"expected": 1, "actual": 0})
        check_world_size(init_info, members)
        self.give_up(now)
        self._made += 1
        connection = Connection(
            connection_id=self._made,
            publisher=publisher,
            init_info=dict(init_info),
            members=tuple(members),
            epoch=self._fleet.epoch,
        )
        self.current = connection
        args = {each.replica_id: {"init_info": connection.init_info_of(each)} for each in members}
        task = self._fleet.ask(InstructionKind.CONNECT, args, now, then=self._connected)
        task.result = connection.connection_id
        self._meeting = task
        return task

    def check_meeting(self, now: float) -> None:
        """A communicator to which a member cannot come any more is not waited for by the others."""
        connection = self.current
        if connection is not None and connection.collective and any(each.out for each in connection.members):
            self.give_up(now)

    def give_up(self, now: float) -> None:
        """End the making of a connection, if one is being made. Its members may wait for a peer."""
        task, self._meeting = self._meeting, None
        for member in () if task is None else tuple(task.waiting):
            self._fleet.withdraw(member, (InstructionKind.CONNECT,), sent=True)
            args = {member.replica_id: {"round_id": None}}
            self._fleet.ask(InstructionKind.DROP, args, now, then=self._fence_wrong)

    def taken_by(self, publisher: str) -> None:
        """A connection belongs to its publisher; the next one makes its own."""
        if self.current is not None and self.current.publisher != publisher:
            self.current = None

    def drop(self) -> None:
        self.current = None

    def welcome(self, member: Member, now: float) -> None:
        """A connection that is not a communicator is made with each replica alone: a joiner gets it."""
        connection = self.current
        if connection is not None and not connection.collective:
            args = {member.replica_id: {"init_info": connection.init_info_of(member)}}
            self._fleet.ask(InstructionKind.CONNECT, args, now, then=self._fence_wrong)

    def _fence_wrong(self, task: Task, now: float) -> None:
        self._fleet.fence_each(judge(task).all_wrong, task.kind, now)

    def _connected(self, task: Task, now: float) -> None:
        """If it failed everywhere it was the publisher or the network, and no weight was touched. Who came
        to a meeting in vain is sound, and is not fenced for those who did not come."""
        verdict = judge(task)
        wrong, absent = verdict.all_wrong, task.absent
        if not wrong and not absent:
            return
        if self.current is not None and self.current.connection_id == task.result:
            self.current = None
        if wrong and not verdict.done and not verdict.broken:
            reason = f"no replica could connect: {sentence(wrong)}"
            task.finish(error=InvalidRequest(reason, {"replicas": wrong}))
            return
        self._fleet.fence_each(verdict.to_fence, "connect", now)
        missing = {**absent, **wrong}
        reason = f"connect again, these replicas are gone or waited for others in vain: {sentence(missing)}"
        task.finish(error=Conflict(reason, {"connect_again": True, "replicas": missing}))
