"""vLLM's RL operations on every serving replica: `/pause`, `/sleep` and their like, with fleet meaning."""

from collections.abc import Mapping
from typing import Any

from deployments.errors import InvalidRequest, ReplicaUnavailable
from deployments.weights.fleet import Fleet
from deployments.weights.members import Task
from deployments.weights.protocol import FleetOperation, InstructionKind
from deployments.weights.round import judge, sentence


class Operations:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def call(self, operation: FleetOperation, arguments: Mapping[str, Any], now: float) -> Task:
        """The task's result is {replica id: value}; its error names the replicas that could not."""
        args = {"operation": operation.value, "arguments": dict(arguments)}
        members = {member.replica_id: args for member in self._fleet.serving()}
        return self._fleet.ask(InstructionKind.CALL, members, now, then=self._called)

    def _called(self, task: Task, now: float) -> None:
        verdict = judge(task)
        self._fleet.fence_each(verdict.failed, "call", now)
        if verdict.rejected:
            wrong = dict(verdict.rejected)
            task.finish(error=InvalidRequest(f"rejected by {sentence(wrong)}", {"replicas": wrong}))
        elif verdict.failed or task.absent:
            missing = {**task.absent, **verdict.failed}
            task.finish(error=ReplicaUnavailable(f"not done by {sentence(missing)}", {"replicas": missing}))
        task.finish(result={replica_id: answer.value for replica_id, answer in task.answers.items()})
