"""Reads the body of a request: bounded in size, and in the time that its client takes for it.

A request that is being read has a place among those that the router admits. Clients that send slowly, or stop
in the middle, would keep everybody else out.
"""

import asyncio

from starlette.requests import Request

from deployments.errors import BodyTooSlow, PayloadTooLarge

GRACE_S = 20.0  # and this much more for each byte that has arrived:
BYTES_PER_S = 64 << 10


async def read_body(request: Request, max_bytes: int, *, grace_s: float = GRACE_S) -> bytes:
    """The request's body.

    Args:
        grace_s: how long it may take, beside the time for its size at `BYTES_PER_S`.

    Raises:
        PayloadTooLarge: it has more than `max_bytes`.
        BodyTooSlow: it did not arrive in time.
    """
    body = bytearray()
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(grace_s) as limit:
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise PayloadTooLarge(
                        f"the body must have at most {max_bytes} bytes", {"max_body_bytes": max_bytes}
                    )
                limit.reschedule(begin + grace_s + len(body) / BYTES_PER_S)
    except TimeoutError as error:
        raise BodyTooSlow(
            f"the body did not arrive in time: {len(body)} bytes in "
            f"{asyncio.get_running_loop().time() - begin:.0f} s, expected {BYTES_PER_S} a second",
            {"received_bytes": len(body)},
        ) from error
    return bytes(body)
