"""How the members answered one errand, and what follows for each of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.ledger.members import Task
from deployments.protocol import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the members answered one errand, as sentences by replica id."""

    done: frozenset[str]
    rejected: Mapping[str, str]
    broken: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def publisher_at_fault(self) -> bool:
        """Nobody could use what was sent: all who have seen it with a sound engine say so."""
        return bool(self.rejected) and not self.done

    @property
    def all_wrong(self) -> dict[str, str]:
        return {**self.rejected, **self.broken, **self.failed}

    @property
    def to_fence(self) -> dict[str, str]:
        """A broken replica always; one that rejects what others took as well."""
        return {**self.failed, **({} if self.publisher_at_fault else self.rejected)}


def judge(task: Task) -> Verdict:
    def messages(outcome: Outcome) -> dict[str, str]:
        return {
            replica_id: answer.message or f"{task.kind} {outcome.value}"
            for replica_id, answer in task.answers.items()
            if answer.outcome is outcome
        }

    return Verdict(
        done=frozenset(messages(Outcome.DONE)),
        rejected=messages(Outcome.REJECTED),
        broken=messages(Outcome.BROKEN),
        failed=messages(Outcome.FAILED),
    )


def sentence(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{replica_id}: {reason}" for replica_id, reason in reasons.items())


def digest_minority(digests: Mapping[str, str]) -> dict[str, str] | None:
    """Replicas (by id) whose combined digest differs from the majority's, with the reason.

    None when there is no majority: then nobody can say whose bytes are right.
    """
    counts = Counter(digests.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return None
    return {
        replica_id: f"its digest {digest} differs from the others' {counts[0][0]}"
        for replica_id, digest in digests.items()
        if digest != counts[0][0]
    }
