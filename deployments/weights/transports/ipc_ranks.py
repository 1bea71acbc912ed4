"""What the trainer ranks of transport `ipc` tell each other during a round.

Each rank waits for the workers that read from it, and rank 0 alone calls the fleet. The others cannot see
that a round has ended without their replica, and nobody can see that another rank has failed. So each rank
says it in its own page, which all map. A rank that is killed says nothing: every wait keeps its deadline.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait

from deployments.errors import TransferFailed
from deployments.weights.transports.ipc_channel import ENDED, FAILED, TAKEN, Page, open_page
from deployments.weights.transports.sender import gather_from_ranks

_ASK_S = 0.02


class TrainerRanks:
    """One rank's view of the others.

    Args:
        own: this rank's page.
        names: of the pages of all ranks, in their order.

    Raises:
        ValueError: the page of a rank is not on this host.
    """

    def __init__(self, rank: int, own: Page, names: Sequence[str]) -> None:
        self._own = own
        # The deadlines are those of the waits for the workers, on the own page.
        self._others = {
            other: open_page(name, len(own) - TAKEN, timeout_s=0.0)
            for other, name in enumerate(names)
            if other != rank
        }

    def say_failed(self, round_id: int) -> None:
        """This rank has failed in the round."""
        self._own[FAILED] = round_id

    def have_ended(self, round_id: int) -> bool:
        """Whether rank 0 has said that all replicas which remain have received everything.

        Raises:
            TransferFailed: it has not, and another rank has failed.
        """
        if 0 in self._others and self._others[0][ENDED] == round_id:
            return True
        for rank, page in self._others.items():
            if page[FAILED] == round_id:
                raise TransferFailed(f"rank {rank} of the trainer has failed in this round")
        return False

    def finish(self, receiving: Future[None], round_id: int) -> None:
        """On rank 0: wait for its call to the fleet, which has a deadline, and say that the round has ended.

        Raises:
            TransferFailed: another rank has failed before that.
            Exception: what the call raises.
        """
        while not wait([receiving], timeout=_ASK_S).done:
            self.have_ended(round_id)
        receiving.result()
        self._own[ENDED] = round_id


def raise_together(failure: Exception | None) -> None:
    """Raise this rank's failure, or on the other ranks TransferFailed with it. Every rank must call this."""
    reasons = gather_from_ranks(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise TransferFailed(f"rank {rank} of the trainer did not connect: {reason}")
