"""How members answered a pending call, classified by what follows for each of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.ledger.members import PendingCall
from deployments.protocol.reports import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answers to a call by outcome; reasons by replica id."""

    done: frozenset[str]
    rejected: Mapping[str, str]
    transfer_failed: Mapping[str, str]
    replica_failed: Mapping[str, str]

    @property
    def publisher_at_fault(self) -> bool:
        """Every intact replica rejected what was sent."""
        return bool(self.rejected) and not self.done

    @property
    def not_done(self) -> dict[str, str]:
        return {**self.rejected, **self.transfer_failed, **self.replica_failed}

    @property
    def to_fence(self) -> dict[str, str]:
        """A failed replica always; one that rejects what others accepted as well."""
        return {**self.replica_failed, **({} if self.publisher_at_fault else self.rejected)}


def classify(call: PendingCall) -> Verdict:
    def reasons(outcome: Outcome) -> dict[str, str]:
        return {
            replica_id: answer.message or f"{call.name} {outcome.value}"
            for replica_id, answer in call.answers.items()
            if answer.outcome is outcome
        }

    return Verdict(
        done=frozenset(reasons(Outcome.DONE)),
        rejected=reasons(Outcome.REJECTED),
        transfer_failed=reasons(Outcome.TRANSFER_FAILED),
        replica_failed=reasons(Outcome.REPLICA_FAILED),
    )


def join_reasons(reasons: Mapping[str, str]) -> str:
    """Reasons by replica id in one line."""
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
