"""Passes a replica's stream on to a client, piece by piece as it arrives.

The router does this for each token of each stream, so there is little between the two connections: one
coroutine, without the generators and the task of Starlette's `StreamingResponse`. A client that reads slowly
holds `send` up, then the connection to the replica, then the engine's front.
"""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.router.forwarding import Begun, Interrupted


class PassedStream(Response):
    """The stream of a replica whose answer has begun.

    Args:
        cut_off: told that the replica was lost; returns the last event for the client.
    """

    def __init__(
        self, begun: Begun, headers: list[tuple[bytes, bytes]], cut_off: Callable[[Interrupted], bytes]
    ) -> None:
        self._cut_off = cut_off
        self._begun = begun
        self.background = None
        self.status_code = begun.answer.status
        self.raw_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; ends when the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(None) as limit:
                listening = asyncio.create_task(_listen(receive, lambda: limit.reschedule(0)))
                try:
                    await self._pass(send)
                finally:
                    listening.cancel()
        except OSError:  # also the timeout's: nobody reads any more
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, send: Send) -> None:
        read = self._begun.piece
        try:
            while piece := await read():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Interrupted as error:
            event = self._cut_off(error)
            await send({"type": "http.response.body", "body": event, "more_body": True})


async def _listen(receive: Receive, leaves: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leaves()
