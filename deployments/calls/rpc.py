"""Calls of the controller's and the trainer's methods, over HTTP.

    CallHandle.method.remote(...) ──► first: the address, over Serve's handle
                                  ──► POST /method, pickled arguments ──► CallServer ──► the method

Serve's own calls do not suffice. At the end of `DeploymentHandle.remote`'s streaming generator Ray 2.60
blocks the callee's event loop until the caller confirms what it got
(`TaskGeneratorBackpressureWaiter::WaitAllObjectsReported`): one stopped caller stops the controller. An actor
call also costs the controller a millisecond, and a thousand replicas poll eight times a round.

Serve passes a random key with the address. Nothing is unpickled before the key is checked.

When the process dies, Serve starts a successor. `retried` calls it again: only for methods that may be
repeated, such as a query, or `close_round`, which the controller answers from its record.
"""

import asyncio
import atexit
import errno
import hmac
import pickle
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
import ray.util
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from deployments.calls.http_server import HttpServer
from deployments.host import tracing
from deployments.host.logs import serve_logger
from deployments.protocol.errors import FleetUnavailable, PayloadTooLarge, SlipstreamError

MAX_BODY_BYTES = 1 << 30  # a directive carries a publisher's payload
CONNECT_TIMEOUT_S = 10.0
IDLE_S = 3600.0  # the client closes idle connections first: a closing server may lose a call
BACKLOG = 4096  # a whole fleet registers with a new controller at once
UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}  # the process may be alive
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # detects a host that is gone
RESTART_WAIT_S = 120.0  # a successor takes many seconds to start on a busy host
RETRY_S = 0.2

Result = TypeVar("Result")
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAddress:
    url: str
    key: str


class CallServer:
    """Serves an object's public coroutine methods, from the first `address()` on, in its event loop."""

    def __init__(self, target: object, host: Callable[[], str] = ray.util.get_node_ip_address) -> None:
        self._target = target
        self._host = host
        self._key = f"Bearer {secrets.token_hex(32)}"
        self._server: HttpServer | None = None

    async def address(self) -> CallAddress:
        if self._server is None:
            self._server = HttpServer(
                self._answer, self._host(), keep_alive_s=int(2 * IDLE_S), backlog=BACKLOG
            )
        return CallAddress(url=f"http://{self._server.address}", key=self._key)

    async def aclose(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def _answer(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        name = scope["path"][1:]
        method = None if name.startswith("_") else getattr(self._target, name, None)
        status, body = 200, b""
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._key.encode()):
            status = 401
        elif method is None:
            status = 404
        else:
            with tracing.span(name, tracing.received(headers)):
                body = await _outcome(method, receive)
        length = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": body})


async def _outcome(method: Callable[..., Coroutine[Any, Any, Any]], receive: Any) -> bytes:
    try:
        args, kwargs = pickle.loads(await _body(receive))
        return pickle.dumps(await method(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
    except SlipstreamError as error:
        if not isinstance(error, FleetUnavailable):  # polls are superseded all the time
            logger.warning("%s: %s", error.type, error.message)
        return pickle.dumps(error)
    except Exception as error:  # a bug in the method must not end the server
        logger.exception("%s failed", getattr(method, "__name__", method))
        return pickle.dumps(SlipstreamError(f"{type(error).__name__}: {error}"))


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the caller is gone")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"a call of more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(body)


class CallHandle:
    """Calls a one-replica deployment that has `call_address`, as `handle.method.remote(...)`. `where`: the
    deployment, or the address of a process without successors."""

    def __init__(self, where: DeploymentHandle | CallAddress) -> None:
        self._where = where
        self._address: CallAddress | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle looks for special methods
            raise AttributeError(name)

        def remote(*args: Any, **kwargs: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(self._call(name, args, kwargs))

        return SimpleNamespace(remote=remote)

    def __reduce__(self) -> tuple[type["CallHandle"], tuple[DeploymentHandle | CallAddress]]:
        return CallHandle, (self._where,)

    async def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises FleetUnavailable (the process is gone, or unreachable and may have done it: {"unreachable":
        true}), the method's SlipstreamError, or Serve's error without a replica."""
        body = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
        if (address := self._address) is None:
            address = self._address = await self._find(name)
        try:
            return await self._post(address, name, body)
        except aiohttp.ClientConnectorError as error:  # nothing was sent: a successor may be up already
            address = self._address = await self._find(name)
            try:
                return await self._post(address, name, body)
            except aiohttp.ClientConnectorError:
                raise _lost(name, str(error)) from error

    async def _post(self, address: CallAddress, name: str, body: bytes) -> Any:
        answer, reason, unreachable = None, "", False
        try:
            async with _session().post(
                f"{address.url}/{name}",
                data=body,
                headers={"authorization": address.key, **tracing.headers()},
            ) as response:
                reason = f"HTTP status {response.status}"
                if response.status == 200:
                    answer = await response.read()
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            unreachable = getattr(error, "errno", None) in UNREACHABLE
        finally:
            # Even after the caller's own deadline: an open connection may lead to a hanging process.
            if answer is None and self._address is address:
                self._address = None
        if answer is None:
            raise _lost(name, reason, unreachable=unreachable)
        outcome = pickle.loads(answer)
        if isinstance(outcome, SlipstreamError):
            raise outcome
        return outcome

    async def _find(self, name: str) -> CallAddress:
        if isinstance(self._where, CallAddress):
            return self._where
        # Calling a reserved replica is an ordinary actor call, without the generator's wait.
        method = self._where.options(method_name="call_address")
        try:
            async with method.choose_replica() as chosen:
                return await method.dispatch(chosen)
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise _lost(name, "Serve cancelled the look-up") from error  # Serve is stopping that process


def _lost(name: str, reason: str, *, unreachable: bool = False) -> FleetUnavailable:
    state = "cannot be reached" if unreachable else "is gone; a successor is starting, try again"
    text = f"{name}: the process {state} ({reason})"
    return FleetUnavailable(text, {"restarting": True, **({"unreachable": True} if unreachable else {})})


def is_lost(error: BaseException) -> bool:
    """Whether the called process is gone or about to be replaced."""
    if isinstance(error, FleetUnavailable):
        return error.detail.get("restarting") is True
    if isinstance(error, RayTaskError | RequestCancelledError):
        return False
    return isinstance(error, RayActorError | RayServeException)


async def bounded(call: Awaitable[Result], what: str, limit_s: float) -> Result:
    """Raises FleetUnavailable, which names `what`, after the deadline."""
    try:
        async with asyncio.timeout(limit_s):  # wait_for can swallow a cancellation
            return await call
    except TimeoutError as error:
        raise _no_answer(what, limit_s) from error


async def retried(
    handle: CallHandle | DeploymentHandle, method: str, *args: Any, limit_s: float = RESTART_WAIT_S
) -> Any:
    """`handle.method.remote(*args)`, repeatable, with `limit_s` per attempt.

    A dead process's successor is asked, for `RESTART_WAIT_S` from the first loss on; then FleetUnavailable.
    """
    loop, deadline = asyncio.get_running_loop(), None
    while True:
        try:
            return await bounded(getattr(handle, method).remote(*args), method, limit_s)
        except Exception as error:
            if not is_lost(error):
                raise
            if deadline is None:
                logger.warning("%s: the process is gone; retrying with its successor", method)
                deadline = loop.time() + RESTART_WAIT_S
            if loop.time() >= deadline:
                raise _no_answer(method, RESTART_WAIT_S) from error
        await asyncio.sleep(RETRY_S)


def _no_answer(what: str, limit_s: float) -> FleetUnavailable:
    return FleetUnavailable(f"{what}: no answer within {limit_s:g} s; try again")


_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for closed in [each for each in _sessions if each.is_closed()]:
            del _sessions[closed]
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        _sessions[loop] = aiohttp.ClientSession(connector=connector, timeout=timeout)
    return _sessions[loop]


@atexit.register
def _close_sessions() -> None:
    with suppress(Exception), closing(asyncio.new_event_loop()) as loop:
        for session in _sessions.values():
            loop.run_until_complete(session.close())


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in KEEP_ALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return made


def run_sync(work: Coroutine[Any, Any, Result]) -> Result:
    """For a thread that has no event loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="calls", daemon=True).start()
    return loop
