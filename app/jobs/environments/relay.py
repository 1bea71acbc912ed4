"""An HTTP server for agents of other programs: requests pass to the fleet, which records them.

    agent ── http://127.0.0.1:PORT/SESSION/v1/chat/completions ──► Relay ── x-rollout-id ──► fleet

The relay adds the policy's distribution and version, and the fleet's token, which no agent sees. Each session
of an agent or judge is a rollout.
"""

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from app.client.completions import Answer, Completion, read_completion
from app.client.connection import Call, FleetError
from app.jobs.policy import DISTRIBUTION, Moved, Policy, Unanswered, is_too_long

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
SESSION = "x-session-id"
MAX_BODY_BYTES = 32 << 20
DROPPED = (
    # change the distribution, or make rollouts alike
    *("seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "max_tokens"),
    *("stream", "stream_options"),  # a whole answer can be sampled again
)


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """Requests of one run of an agent.

    Attributes:
        rollouts, answers: by the agent's sessions; "": it sent none.
        failure: why a request got no answer, through no fault of the model.
        refused: why the fleet refused one, as a conversation that exceeds the engine's context.
        over: the agent sends no more requests, so the address can be reused.
    """

    url: str
    policy: Policy
    rollouts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    failure: Exception | None = None
    refused: str | None = None
    over: bool = False


class Relay:
    """Addresses cannot be guessed, and are reused: agents keep a client for each."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._free: list[str] = []
        self._address = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/{name}{path:/.*}", self._respond)
        # handler_cancellation: do not learn from an answer to an agent that hung up.
        runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self._address = f"http://{host}:{port}"
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def session(self, policy: Policy) -> AsyncIterator[AgentSession]:
        name = self._free.pop() if self._free else uuid.uuid4().hex
        self._sessions[name] = session = AgentSession(url=f"{self._address}/{name}", policy=policy)
        try:
            yield session
        finally:
            del self._sessions[name]
            if session.over:
                self._free.append(name)

    async def _respond(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["name"])
        path = request.match_info["path"]
        if session is not None and session.failure is not None:
            return _error(409, f"this rollout has failed: {session.failure}")
        if session is None or path not in (CHAT, GENERATE):
            expected = f"{CHAT} or {GENERATE} below the address of a rollout that runs"
            return _error(404, f"expected {expected}, got {path[:80]}")
        try:
            asked = json.loads(await request.read())
            if not isinstance(asked, dict):
                raise ValueError("expected a JSON object")
            streamed = bool(asked.get("stream"))
            if streamed and path != CHAT:
                raise ValueError(f"{path} is not streamed here: expected no 'stream'")
            with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
            body = (_chat_body if path == CHAT else _generate_body)(asked, session.policy)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            return _error(400, str(error))
        answer = await _ask(session, path, body, request.headers.get(SESSION, ""))
        if isinstance(answer, web.Response):
            return answer
        if streamed:
            events = _events(json.loads(answer), with_usage=with_usage)
            return web.Response(body=events, content_type="text/event-stream")
        return web.Response(body=answer, content_type="application/json")


async def _ask(session: AgentSession, path: str, body: Mapping[str, Any], name: str) -> bytes | web.Response:
    content = b""

    def read(answer: bytes, headers: Mapping[str, str]) -> Completion:
        nonlocal content
        content = answer
        return read_completion(answer, headers)

    try:
        call = Call(method="POST", path=path, body=body, read=read)
        attempt = session.rollouts.setdefault(name, session.policy.attempt())
        completion = await session.policy.forward(call, name, attempt)
    except FleetError as error:
        if error.status == 413 or is_too_long(error):
            session.refused = error.message
        elif error.status != 400:  # the agent's own mistake, which it may handle
            session.failure = session.failure or error
        return _error(error.status or 502, error.message)
    except (Unanswered, Moved) as error:
        session.failure = session.failure or error
        return _error(409, str(error))
    session.answers.setdefault(name, []).append(completion.answer)
    return content


def _chat_body(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    forced = {"model": policy.name, "return_token_ids": True}
    return _sampling(asked, "max_completion_tokens", policy) | forced


def _generate_body(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    sampling = _sampling(dict(asked.get("sampling_params") or {}), "max_tokens", policy)
    if not isinstance(asked.get("token_ids"), list):
        raise ValueError("expected 'token_ids', a list")
    return {**asked, "model": policy.name, "sampling_params": sampling}


def _sampling(given: Mapping[str, Any], limit: str, policy: Policy) -> dict[str, Any]:
    kept = {name: value for name, value in given.items() if name not in DROPPED}
    most = given.get(limit) or given.get("max_tokens") or policy.max_tokens
    return kept | DISTRIBUTION | {"n": 1, limit: min(int(most), policy.max_tokens)}


def _events(answer: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """In one event, for clients that stream."""
    common = {name: value for name, value in answer.items() if name not in ("choices", "usage", "object")}
    common["object"] = "chat.completion.chunk"
    choices = []
    for choice in answer["choices"]:
        message = dict(choice.get("message") or {})
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        choices.append({name: value for name, value in choice.items() if name != "message"})
        choices[-1]["delta"] = message
    chunks = [{**common, "choices": choices}]
    if with_usage:
        chunks.append({**common, "choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: %s\n\n" % text.encode() for text in (*map(json.dumps, chunks), "[DONE]"))


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "relay", "code": status}}
    return web.json_response(body, status=status)
