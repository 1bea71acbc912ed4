"""What a killed trainer worker leaves behind: an open round, a lease, and memory that replicas opened.

Until the lease expires nobody else can publish, and no joiner loads a stored version beside the open round.
Ray says at once that the process is gone, so the trainer ends both. It takes a lease under the same name,
which makes the dead worker's token stale: should a call of it still be on its way, it is refused.
"""

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.lost_calls import answered
from deployments.protocol.status import FleetStatus
from deployments.publish_session import PublishSession
from deployments.trainer.spec import PUBLISHER
from deployments.unary import UnaryHandle

_OPEN = "open"

logger = serve_logger()


async def end_former_session(controller: UnaryHandle, *, shares_memory: bool = False) -> None:
    """End the round and the lease of a worker that is gone. What fails is logged: the lease expires then.

    A round that was closed is left alone: it needs its publisher no more, and may commit.

    Args:
        shares_memory: replicas open the trainer's GPU memory, which stays allocated until they disconnect,
            and the next worker needs it.
    """
    try:
        if not shares_memory:
            fleet: FleetStatus = await answered(lambda: controller.fleet.remote(), "fleet")
            if fleet.lease is None or fleet.lease.publisher != PUBLISHER:
                return
            if fleet.round is not None and fleet.round.phase != _OPEN:
                return
        async with PublishSession(controller, PUBLISHER) as session:
            await session.acquire()
            if shares_memory:
                await session.disconnect()
    except SlipstreamError as error:  # another publisher was quicker, or the controller is gone or hangs
        logger.warning("what a former trainer left behind is not cleaned up: %s", error)
