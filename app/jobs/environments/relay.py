"""An address for agents of other programs: the fleet's answers pass through it, and their tokens are kept.

    another program ── http://127.0.0.1:PORT/ROLLOUT/v1/chat/completions ──► Relay ──► fleet
                                                                              │
                             Rollout.exchanges: session, prompt, answer  ◄────┘

Each rollout has an address of its own while it lasts. What is asked below it is sampled from the policy's own
distribution and version, whatever the program wants: rewards and log-probabilities must be about the policy.
Constraints such as a `tool_choice` pass. vLLM applies their grammar before it computes log-probabilities
(`GPUModelRunner.sample_tokens`), so those of such an answer are not the policy's: its tokens are marked.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from app.client.completions import Answer, Completion, read_completion
from app.client.connection import Call, FleetError
from app.jobs.attempts import Sample
from app.jobs.environments.environment import Transcript
from app.jobs.rollouts import DISTRIBUTION, Moved, Policy, Unanswered

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
SESSION = "x-session-id"
MAX_BODY_BYTES = 32 << 20
NOT_PASSED_ON = (
    # of another distribution, or of the same answer in each attempt; more of them: DISTRIBUTION
    *("seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "max_tokens"),
    *("stream", "stream_options"),  # the fleet is asked for a whole answer, which may be asked for again
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer, as tokens."""

    session: str  # the program's name of its conversation; empty if it has none
    prompt_token_ids: Sequence[int]
    answer: Answer
    constrained: bool = False  # by a grammar


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What one run of an agent has asked.

    Attributes:
        url: for the agent, without `/v1`.
        failure: why a request got no answer, which says nothing about the model.
        refused: why the fleet refused a request: mostly a conversation that is longer than the engine takes.
        over: the agent asks nothing any more, so that another one can have its address.
    """

    url: str
    policy: Policy
    exchanges: list[Exchange] = field(default_factory=list)
    failure: Exception | None = None
    refused: str | None = None
    over: bool = False
    _failed: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: Exception) -> None:
        """No reward of this rollout would be about the model."""
        self.failure = self.failure or error
        self._failed.set()

    async def unless_failed(self, agent: Coroutine[Any, Any, T]) -> T:
        """What the agent's run returns, cancelled as soon as a request has failed.

        Raises:
            Exception: the failure.
        """
        tasks = asyncio.create_task(agent), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Relay:
    """The server of all rollouts; it listens on this host alone.

    Addresses cannot be guessed, and are used again: agents keep a client for each.
    """

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._free: list[str] = []  # names of rollouts that are over
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self) -> None:
        """Listen."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/{rollout}{path:/.*}", self._respond)
        # An agent that hangs up wants no answer, and must not be learned from.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def rollout(self, policy: Policy) -> AsyncIterator[Rollout]:
        """An address that answers with this policy while the block runs."""
        name = self._free.pop() if self._free else uuid.uuid4().hex
        self._rollouts[name] = rollout = Rollout(url=f"{self._address}/{name}", policy=policy)
        try:
            yield rollout
        finally:
            del self._rollouts[name]
            if rollout.over:
                self._free.append(name)

    async def _respond(self, request: web.Request) -> web.Response:
        rollout = self._rollouts.get(request.match_info["rollout"])
        path = request.match_info["path"]
        if rollout is not None and rollout.failure is not None:
            return _error(409, f"this rollout has failed: {rollout.failure}")
        if rollout is None or path not in (CHAT, GENERATE):
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
            body = _chat(asked, rollout.policy) if path == CHAT else _generate(asked, rollout.policy)
            constrained = _is_constrained(body)
        except (ValueError, TypeError, AttributeError) as error:
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
            if error.status in (400, 413):
                rollout.refused = error.message
            else:
                rollout.fail(error)
            return _error(error.status or 502, error.message)
        except (Unanswered, Moved) as error:
            rollout.fail(error)
            return _error(409, str(error))
        prompt = completion.prompt_token_ids if path == CHAT else body["token_ids"]
        rollout.exchanges.append(
            Exchange(
                session=session,
                prompt_token_ids=prompt,
                answer=completion.answer,
                constrained=constrained,
            )
        )
        if streamed:
            events = _events(json.loads(content), with_usage=with_usage)
            return web.Response(body=events, content_type="text/event-stream")
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
        transcript.said(exchange.answer, constrained=exchange.constrained)
    return [transcript.sample() for transcript in transcripts]


def _chat(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    tokens = {"max_completion_tokens": _at_most(limit, policy)}
    return {
        **_passed_on(asked),
        **DISTRIBUTION,
        **tokens,
        "model": policy.name,
        "n": 1,
        "logprobs": True,
        "return_token_ids": True,
    }


def _events(answer: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """The stream of a whole chat answer, in one event: agents' clients mostly stream."""
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


def _generate(asked: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    given = dict(asked.get("sampling_params") or {})
    limit = {"max_tokens": _at_most(given.get("max_tokens"), policy)}
    sampling = _passed_on(given) | DISTRIBUTION | limit | {"n": 1, "logprobs": given.get("logprobs") or 0}
    if not isinstance(asked.get("token_ids"), list):
        raise ValueError("expected 'token_ids', a list")
    return {**asked, "model": policy.name, "sampling_params": sampling}


def _passed_on(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in NOT_PASSED_ON}


def _is_constrained(body: Mapping[str, Any]) -> bool:
    """Whether vLLM applies a grammar to what it samples for this request (`Parser.adjust_request`)."""
    sampling = body.get("sampling_params") or body
    if (
        sampling.get("structured_outputs")
        or (body.get("response_format") or {}).get("type", "text") != "text"
    ):
        return True
    tools, choice = body.get("tools") or (), body.get("tool_choice") or "auto"
    if not tools or choice == "none":
        return False
    strict = any(isinstance(tool, dict) and (tool.get("function") or {}).get("strict") for tool in tools)
    return choice != "auto" or strict or body.get("parallel_tool_calls") is False


def _at_most(limit: int | None, policy: Policy) -> int:
    return policy.sampling.max_tokens if limit is None else min(int(limit), policy.sampling.max_tokens)


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "relay", "code": status}}
    return web.json_response(body, status=status)
