"""Clients of a fleet, blocking and asyncio.

calls.rounds() ──► Call[list[RoundReport]] ──► FleetClient.send ──► list[RoundReport]
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar

import httpx

T = TypeVar("T")
RETRY_PAUSE_S = 1.0
POOL_SIZE = 4  # connections
KEPT_S = 60.0  # idle connections; Serve closes them after 90
MAX_SHOWN = 1000  # characters of a response in a message
Reader = Callable[[bytes, Mapping[str, str]], T]  # takes a body or one event of a stream, and headers


class FleetError(RuntimeError):
    """The fleet refused a call or did not respond.

    Attributes:
        message: the fleet's explanation.
        status: HTTP status; None without a response.
        type: see `deployments.protocol.errors`; empty if unknown.
    """

    def __init__(self, text: str, *, message: str = "", status: int | None = None, type: str = "") -> None:
        super().__init__(text)
        self.message = message if message else text
        self.status = status
        self.type = type


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """A request, and how its response is read."""

    method: str
    path: str
    read: Reader[T]
    body: Mapping[str, Any] | None = None
    content: bytes | None = None  # instead of JSON
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True  # may be sent again if the response was lost

    def arguments(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "url": self.path,
            "json": self.body,
            "content": self.content,
            "params": dict(self.query) or None,
            "headers": dict(self.headers),
        }


class FleetClient:
    """Sends calls one at a time. `connect` makes one; use it as a context manager."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    @classmethod
    def connect(cls, url: str, token: str | None = None, timeout_s: float | None = 600.0) -> Self:
        """`timeout_s` None: no deadline."""
        return cls(httpx.Client(**_settings(url, token, timeout_s)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def send(self, call: Call[T]) -> T:
        """Raises FleetError: the fleet refused, did not respond, or sent something else."""
        try:
            answer = self.http.request(**call.arguments())
        except httpx.TransportError as error:
            raise unreachable(self.http.base_url, error) from error
        return read(call, answer)


class _Pools(httpx.AsyncBaseTransport):
    """Used in turn: one of httpcore's looks at each of its connections whenever a request begins or ends,
    which costs more than the requests where there are many (benchmarks/RESULTS.md)."""

    def __init__(self, count: int, *, verify: bool) -> None:
        certificates = httpx.create_ssl_context(verify, trust_env=False)
        limits = httpx.Limits(keepalive_expiry=KEPT_S)
        self._pools = [httpx.AsyncHTTPTransport(certificates, limits=limits) for _ in range(count)]
        self._turns = cycle(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for each in self._pools:
            await each.aclose()


class AsyncFleetClient:
    """Sends calls concurrently.

    Args:
        patience_s: how long to retry while the fleet responds 503 or not at all.
        retry_pause_s: between attempts, unless the fleet sets Retry-After.
        say: prints one line per period of retries.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        patience_s: float = 0.0,
        retry_pause_s: float = RETRY_PAUSE_S,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.http = http
        self._patience_s = patience_s
        self._retry_pause_s = retry_pause_s
        self._say = say
        self._waiting: set[asyncio.Task[Any] | None] = set()

    @classmethod
    def connect(
        cls,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float | None = 600.0,
        patience_s: float = 0.0,
        at_once: int = 100,
        say: Callable[[str], object] | None = None,
    ) -> Self:
        """`timeout_s` None: no deadline. `at_once`: about so many calls at a time."""
        settings = _settings(url, token, timeout_s)
        transport = _Pools(max(1, at_once // POOL_SIZE), verify=settings["verify"])
        http = httpx.AsyncClient(**settings, transport=transport)
        return cls(http, patience_s, say=say)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    async def send(self, call: Call[T], *, patient: bool = True) -> T:
        """`patient` False: no retries. Raises FleetError: the fleet refused, did not respond, or sent
        something else."""
        try:
            return await self._send(call, time.monotonic() + (self._patience_s if patient else 0.0))
        finally:
            self._waiting.discard(asyncio.current_task())

    async def _send(self, call: Call[T], deadline: float) -> T:
        while True:
            pause_s = self._retry_pause_s
            try:
                answer = await self._request(call)
            except httpx.TransportError as error:
                # It may have been executed: a step must not happen twice.
                lost = not call.repeatable and not isinstance(error, httpx.ConnectError)
                if lost or time.monotonic() >= deadline:
                    raise unreachable(self.http.base_url, error) from error
                self._waits(call, str(error) or type(error).__name__)
            else:
                if answer.status_code != 503 or time.monotonic() >= deadline:
                    return read(call, answer)
                self._waits(call, answer.text[:MAX_SHOWN])
                with suppress(ValueError):  # a date, of a proxy
                    pause_s = float(answer.headers.get("retry-after", pause_s))
            await asyncio.sleep(min(max(0.0, deadline - time.monotonic()), pause_s))

    async def _request(self, call: Call[Any]) -> httpx.Response:
        """Raises httpx.TransportError, also for a proxy's answer when its router is gone: Serve's HAProxy
        sends 500, others 502 or 504. Ours is JSON."""
        answer = await self.http.request(**call.arguments())
        if answer.status_code in (500, 502, 504) and "json" not in answer.headers.get("content-type", ""):
            raise httpx.RemoteProtocolError(f"{answer.status_code}: {answer.text[:MAX_SHOWN]}")
        return answer

    def _waits(self, call: Call[Any], reason: str) -> None:
        if self._say is not None and not self._waiting:
            self._say(f"{call.path}: trying again for up to {self._patience_s:g} s: {reason}")
        self._waiting.add(asyncio.current_task())

    async def stream(self, call: Call[T]) -> AsyncIterator[T]:
        """Events that hold an object. Raises FleetError."""
        try:
            async with self.http.stream(**call.arguments()) as answer:
                if not answer.is_success:
                    await answer.aread()
                    _refuse(call, answer)
                async for event in _objects(answer):
                    yield _read(call, event, answer)
        except httpx.TransportError as error:
            raise unreachable(self.http.base_url, error) from error


async def _objects(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in answer.aiter_bytes():
        # httpx also splits at U+0085 and others, which JSON may contain.
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield event.removeprefix(b"data: ")


def token_from(environment: Mapping[str, str] | None = None) -> str | None:
    """SLIPSTREAM_TOKEN, else file SLIPSTREAM_TOKEN_FILE, else SLIPSTREAM_USER_TOKEN. Raises FleetError."""
    # Not an option: other users can read arguments.
    given = os.environ if environment is None else environment
    if token := given.get("SLIPSTREAM_TOKEN", "").strip():
        return token
    if file := given.get("SLIPSTREAM_TOKEN_FILE", ""):
        try:
            return next(iter(Path(file).read_text(encoding="utf-8").split()), None)
        except (OSError, UnicodeDecodeError) as error:
            raise FleetError(f"SLIPSTREAM_TOKEN_FILE: expected a readable file, got {file}") from error
    token = given.get("SLIPSTREAM_USER_TOKEN", "").strip()
    return token if token else None


def without_credentials(url: str) -> tuple[str, str | None]:
    """An address without credentials, and its password, which is a token. Raises FleetError."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise FleetError(
            f"expected an address such as http://127.0.0.1:8000, got {url!r} ({error})"
        ) from error
    password = address.password if address.password else None
    return str(address.copy_with(username=None, password=None)).rstrip("/"), password


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def unreachable(url: object, error: httpx.TransportError) -> FleetError:
    reason = str(error) if str(error) else type(error).__name__
    return FleetError(f"no server answers at {str(url).rstrip('/')} ({reason})")


def read(call: Call[T], answer: httpx.Response) -> T:
    """Raises FleetError if the response is an error or unreadable."""
    if not answer.is_success:
        _refuse(call, answer)
    return _read(call, answer.content, answer)


def _read(call: Call[T], content: bytes, answer: httpx.Response) -> T:
    try:
        return call.read(content, answer.headers)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        text = f"{call.method} {call.path}: the answer cannot be read: {type(error).__name__}: {error}"
        raise FleetError(text, status=answer.status_code) from error


def _refuse(call: Call[Any], answer: httpx.Response) -> NoReturn:
    try:
        error = answer.json()["error"]
        message, kind = str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, TypeError):
        message, kind = answer.text[:MAX_SHOWN], ""
    text = f"{call.method} {call.path}: {answer.status_code}: {message}"
    raise FleetError(text, message=message, status=answer.status_code, type=kind)


def _settings(url: str, token: str | None, timeout_s: float | None) -> dict[str, Any]:
    address, password = without_credentials(url)
    return {
        "base_url": address,
        "headers": bearer(token if password is None else password),
        "timeout": httpx.Timeout(timeout_s, connect=10.0),
        "trust_env": False,  # the environment's proxy is for the internet
        "verify": address.startswith("https:"),  # reading the certificates takes 30 ms
    }
