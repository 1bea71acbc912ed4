"""What a starting replica loads: what the controller names, if the store really has it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from deployments.logs import serve_logger
from deployments.protocol.instructions import JoinAnswer
from deployments.protocol.reports import Unloadable
from deployments.weights.store.integrity import check_files

ASK_AGAIN_S = 1.0
ANSWER_S = 20.0  # of the controller, which answers at once: the question or its answer is lost
logger = serve_logger()


async def find_first_weights(
    ask: Callable[[Unloadable | None], Awaitable[JoinAnswer]],
    ask_again_s: float = ASK_AGAIN_S,
    answer_s: float = ANSWER_S,
) -> JoinAnswer:
    """Ask until the answer can be loaded. Waits for a controller that cannot be reached.

    Args:
        ask: the controller's `join`; its argument is the version that was named before and cannot be loaded.
            A question that comes again has the same answer.
        answer_s: how long one answer is waited for.
    """
    unloadable: Unloadable | None = None
    while True:
        try:
            async with asyncio.timeout(answer_s):  # not wait_for, which can swallow a cancellation
                answer = await ask(unloadable)
        except Exception as error:  # the controller may start after us, or be restarting
            logger.debug("controller not reached: %s", error)
            await asyncio.sleep(ask_again_s)
            continue
        if answer.path is None:
            return answer
        try:
            await asyncio.to_thread(
                check_files, Path(answer.path), answer.version, answer.fleet_id, answer.digest
            )
        except (OSError, ValueError) as error:
            logger.warning("another version is asked for, because the promised one is unusable: %s", error)
            unloadable = Unloadable(version=answer.version, reason=str(error))
            await asyncio.sleep(ask_again_s)
            continue
        return answer
