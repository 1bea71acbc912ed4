"""A request that waits before it is answered, for as long as its client does.

uvicorn only marks that a client has left: whoever waits has to read on to learn of it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(ready: Awaitable[None], receive: Receive) -> Receive:
    """Wait for something before a request is answered.

    Returns:
        What reads the request from its beginning.

    Raises:
        ClientLeft: the client was gone before it came.
    """
    messages: deque[Message] = deque()

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    try:
        async with asyncio.timeout(None) as limit:
            listening = asyncio.create_task(_listen(receive, messages, lambda: limit.reschedule(0)))
            try:
                await ready
            finally:
                listening.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientLeft from None
        raise
    return replay


async def _listen(receive: Receive, messages: deque[Message], leaves: Callable[[], None]) -> None:
    while not messages or messages[-1]["type"] != "http.disconnect":
        messages.append(await receive())
    leaves()
