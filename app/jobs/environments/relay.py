"""An address for agents of other programs: the fleet's answers pass through it, and their tokens are kept.

    another program ── http://127.0.0.1:PORT/ROLLOUT/v1/chat/completions ──► Relay ──► fleet
                                                                              │
                             Rollout.exchanges: session, prompt, answer  ◄────┘

Each rollout has an address of its own. What is asked below it is sampled from the policy's own distribution
and version, whatever the program wants: rewards and log-probabilities must be about the policy.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from app.client.completions import Answer, Completion, read_completion
from app.client.connection import Call, FleetError
from app.jobs.attempts import Sample
from app.jobs.environments.transcript import Transcript
from app.jobs.rollouts import DISTRIBUTION, Moved, Policy, Unanswered

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
SESSION = "x-session-id"
MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer, as tokens."""

    session: str  # the program's name of its conversation; empty if it has none
    prompt_token_ids: Sequence[int]
    answer: Answer


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What one run of an agent has asked.

    Attributes:
        url: for the agent, without `/v1`.
        failure: why a request got no answer, which says nothing about the model.
    """

    url: str
    policy: Policy
    exchanges: list[Exchange] = field(default_factory=list)
    failure: Exception | None = None


class Relay:
    """The server of all rollouts; it listens on this host alone."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def rollout(self, policy: Policy) -> AsyncIterator[Rollout]:
        """An address that answers with this policy while the block runs."""
        await self._start()
        name = uuid.uuid4().hex
        self._rollouts[name] = rollout = Rollout(url=f"{self._address}/{name}", policy=policy)
        try:
            yield rollout
        finally:
            del self._rollouts[name]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            application = web.Application(client_max_size=MAX_BODY_BYTES)
            application.router.add_post("/{rollout}{path:/.*}", self._respond)
            runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self._runner, self._address = runner, f"http://{host}:{port}"

    async def _respond(self, request: web.Request) -> web.Response:
        rollout = self._rollouts.get(request.match_info["rollout"])
        path = request.match_info["path"]
        if rollout is None or path not in (CHAT, GENERATE):
            expected = f"{CHAT} or {GENERATE} below the address of a rollout that runs"
            return _error(404, f"expected {expected}, got {path[:80]}")
        try:
            asked = json.loads(await request.read())
            if not isinstance(asked, dict) or asked.get("stream"):
                raise ValueError("expected a JSON object without 'stream'")
            body = _chat(asked, rollout.policy) if path == CHAT else _generate(asked, rollout.policy)
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        session = request.headers.get(SESSION, "")
        content = bytearray()

        def read(answer: bytes, headers: Mapping[str, str]) -> Completion:
            content[:] = answer
            return read_completion(answer, headers)

        call = Call(method="POST", path=path, body=body, read=read)
        try:
            completion = await rollout.policy.exchange(call, session, with_prompt=path == CHAT)
        except FleetError as error:
            if error.status is None or not 400 <= error.status < 500:
                rollout.failure = error
            return _error(error.status or 502, error.message)
        except (Unanswered, Moved) as error:
            rollout.failure = error
            return _error(409, str(error))
        prompt = completion.prompt_token_ids if path == CHAT else body["token_ids"]
        rollout.exchanges.append(Exchange(session=session, prompt_token_ids=prompt, answer=completion.answer))
        return web.Response(body=bytes(content), content_type="application/json")


def samples(exchanges: Sequence[Exchange]) -> list[Sample]:
    """What a trainer learns from: one sample for each conversation whose tokens only grew.

    A request whose prompt begins with all tokens of an earlier one and its answer goes on with it. Any other
    one begins a sample: so does each turn, if the program renders earlier turns anew into other tokens.
    """
    transcripts: list[Transcript] = []
    for exchange in exchanges:
        prompt = list(exchange.prompt_token_ids)
        known = [each for each in transcripts if prompt[: len(each.seen)] == each.seen]
        if known:
            transcript = max(known, key=lambda each: len(each.seen))
            transcript.inserted(prompt[len(transcript.seen) :])
        else:
            transcript = Transcript(prompt)
            transcripts.append(transcript)
        transcript.said(exchange.answer)
    return [transcript.sample() for transcript in transcripts]


def _chat(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    tokens = {"max_completion_tokens": _at_most(limit, policy)}
    return {
        **{name: value for name, value in asked.items() if name != "max_tokens"},
        **DISTRIBUTION,
        **tokens,
        "model": policy.name,
        "n": 1,
        "logprobs": True,
        "return_token_ids": True,
    }


def _generate(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    sampling = dict(asked.get("sampling_params") or {})
    sampling |= DISTRIBUTION | {"max_tokens": _at_most(sampling.get("max_tokens"), policy), "n": 1}
    sampling["logprobs"] = sampling.get("logprobs") or 0
    if not isinstance(asked.get("token_ids"), list):
        raise ValueError("expected 'token_ids', a list")
    return {**asked, "model": policy.name, "sampling_params": sampling}


def _at_most(limit: int | None, policy: Policy) -> int:
    return policy.sampling.max_tokens if limit is None else min(int(limit), policy.sampling.max_tokens)


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "relay", "code": status}}
    return web.json_response(body, status=status)
