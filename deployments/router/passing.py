"""Passes a replica's stream on to a client, piece by piece as it arrives.

The router does this for each token of each stream, so there is little between the two connections: `send` is
called where the piece arrives, without the generators and the task of Starlette's `StreamingResponse`. A
client that reads slowly holds `send` up, then the connection to the replica, then the engine's front.
"""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.router.exchange import ExchangeLost, Headers
from deployments.router.forwarding import Begun


class PassedStream(Response):
    """The stream of a replica whose answer has begun.

    Args:
        cut_off: told that the replica was lost; returns the last event for the client.
    """

    def __init__(self, begun: Begun, headers: Headers, cut_off: Callable[[ExchangeLost], bytes]) -> None:
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
        async def take(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        try:
            await self._begun.answer.pass_on(take)
        except ExchangeLost as error:
            await take(self._cut_off(error))


async def _listen(receive: Receive, leaves: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leaves()
