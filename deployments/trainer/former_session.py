"""What a trainer's worker leaves behind that was killed while it published: an open round, and a lease.

Until the lease expires nobody else can publish, and no joiner loads a stored version beside the open round.
Ray says at once that the process is gone, so the trainer ends both. It takes a lease under the same name,
which makes the dead worker's token stale: should a call of it still be on its way, it is refused.
"""

import asyncio

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.lost_calls import RESTART_WAIT_S, answered, is_lost
from deployments.protocol.status import FleetStatus
from deployments.trainer.spec import PUBLISHER
from deployments.unary import UnaryHandle

_OPEN = "open"

logger = serve_logger()


async def end_former_session(controller: UnaryHandle) -> None:
    """End the round and the lease of a worker that is gone. What fails is logged: the lease expires then.

    A round that was closed is left alone: it needs its publisher no more, and may commit.
    """
    try:
        fleet: FleetStatus = await answered(lambda: controller.fleet.remote(), "fleet")
        if fleet.lease is None or fleet.lease.publisher != PUBLISHER:
            return
        if fleet.round is not None and fleet.round.phase != _OPEN:
            return
        lease = await answered(lambda: controller.acquire.remote(PUBLISHER), "acquire")
        await asyncio.wait_for(controller.release.remote(lease.token), RESTART_WAIT_S)
    except Exception as error:  # another publisher was quicker, or the controller is gone or hangs
        if not (is_lost(error) or isinstance(error, SlipstreamError | TimeoutError)):
            raise
        logger.warning("a lost trainer worker's lease is not ended and expires: %s", error)
    else:
        logger.info("the lease of a lost trainer worker is ended; others may publish")
