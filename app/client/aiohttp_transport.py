"""httpx over aiohttp's connections.

httpcore's pool looks at all connections whenever a request begins or ends: of 128 at a time each took 9 to 64
ms of processor time, and takes 1 to 2 ms so (benchmarks/RESULTS.md). httpx-aiohttp 0.2 tells no request that
was not sent from one that may have been executed, and passes some of aiohttp's errors on as they are.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import aiohttp
import httpx
from yarl import URL

MAX_HEADER_BYTES = 1 << 16


class AiohttpTransport(httpx.AsyncBaseTransport):
    """For one event loop.

    Args:
        max_connections: further requests wait.
        kept_s: for which an idle connection stays open.
    """

    def __init__(self, *, max_connections: int, kept_s: float) -> None:
        self._max_connections, self._kept_s = max_connections, kept_s

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made in the event loop."""
        certificates = httpx.create_ssl_context(trust_env=False)  # those of httpx's own transport
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._max_connections, keepalive_timeout=self._kept_s, ssl=certificates
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # httpx does
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.ConnectError: it was not sent. Another httpx.TransportError: it may have been done."""
        limits = request.extensions.get("timeout", {})
        content = await request.aread()
        with _httpx_errors():
            async with asyncio.timeout(_sum(limits)):  # aiohttp waits without limit until a body is sent
                answer = await self._session.request(
                    request.method,
                    URL(str(request.url), encoded=True),
                    headers=request.headers.multi_items(),
                    data=content or None,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        sock_connect=limits.get("connect"),
                        sock_read=limits.get("read"),
                        connect=limits.get("pool"),
                    ),
                )
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=_Body(answer))

    async def aclose(self) -> None:
        if "_session" in self.__dict__:
            await self._session.close()


def _sum(limits: Mapping[str, float | None]) -> float | None:
    waits = [limits.get(each) for each in ("pool", "write", "read")]
    return None if None in waits else sum(filter(None, waits))


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for piece in self._answer.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        self._answer.release()  # closes the connection if the body was not read to its end


@contextmanager
def _httpx_errors() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.RemoteProtocolError(str(error)) from error
