"""A judge: a served model that rewards answers. A reward model answers vLLM's `/pooling` with a score; a chat
model is asked by a rubric.

An unreachable judge is asked again until the deadline, while the rollouts wait; then the job ends.
"""

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from app.client import calls
from app.client.connection import AsyncFleetClient, Call, FleetError
from app.jobs.policy import Unanswered
from app.jobs.rewards import checked

TOKEN = "SLIPSTREAM_JUDGE_TOKEN"
AT_ONCE = 64  # requests, which its engine batches
KEPT = 100_000  # rewards
MAX_TOKENS = 1024  # limits a chat model's reasons
SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
    "additionalProperties": False,
}


class Judge:
    """A reward of `app.jobs.rewards`.

    Args:
        rubric: what a chat model rewards; None: it is a reward model.
    """

    def __init__(self, client: AsyncFleetClient, rubric: str | None) -> None:
        self._client = client
        self._rubric = rubric
        self._model: str | None = None
        self._free = asyncio.Semaphore(AT_ONCE)
        self._rewards: OrderedDict[str, asyncio.Task[float]] = OrderedDict()  # keys: content

    @classmethod
    def connect(cls, url: str, rubric: str | None, timeout_s: float) -> "Judge":
        token = os.environ.get(TOKEN, "").strip() or None
        client = AsyncFleetClient.connect(
            url.rstrip("/").removesuffix("/v1"),
            token,
            timeout_s=timeout_s,
            patience_s=timeout_s,
            at_once=AT_ONCE,
            say=partial(print, "the judge:", flush=True),
        )
        return cls(client, rubric)

    async def __call__(self, entry: Mapping[str, Any], answer: str, given: Mapping[str, Any]) -> float:
        """Raises FleetError: no answer; Unanswered: it refuses this conversation, or a chat model gives no
        score."""
        messages = given["messages"]
        key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
        if key not in self._rewards:
            self._rewards[key] = asyncio.create_task(self._reward(messages))
            self._rewards[key].add_done_callback(lambda task: task.cancelled() or task.exception())
            if len(self._rewards) > KEPT:
                self._rewards.popitem(last=False)
        task = self._rewards[key]
        try:
            return await asyncio.shield(task)  # others may wait for it, too
        except (FleetError, Unanswered):
            if self._rewards.get(key) is task:
                del self._rewards[key]
            raise

    async def _reward(self, messages: list[dict[str, Any]]) -> float:
        async with self._free:
            try:
                if self._model is None:
                    self._model = await self._client.send(calls.model())
                return await self._client.send(self._call(self._model, messages))
            except FleetError as error:
                said = f"the judge {self._model or 'model'} at {self._client.http.base_url}: {error}"
                no_score = error.status == 200 and self._rubric is not None
                if no_score or error.status in (400, 413, 422):
                    raise Unanswered(said) from error
                token = f". Its token is expected in {TOKEN}" if error.status == 401 else ""
                raise FleetError(
                    f"{said}{token}. No rollout is lost, and none got another reward: continue with --resume"
                ) from error

    def _call(self, model: str, messages: list[dict[str, Any]]) -> Call[float]:
        if self._rubric is None:
            body = {"model": model, "messages": messages, "use_activation": False}
            return Call(method="POST", path="/pooling", body=body, read=read_pooled)
        said = "\n\n".join(f"[{each['role']}]\n{_text(each.get('content'))}" for each in messages)
        body = {
            "model": model,
            "messages": [{"role": "system", "content": self._rubric}, {"role": "user", "content": said}],
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "score", "schema": SCHEMA}},
        }
        return Call(method="POST", path="/v1/chat/completions", body=body, read=read_chat)


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content)
    return "\n".join(
        part["text"] if part.get("type") == "text" else f"({part.get('type')})" for part in content
    )


def read_pooled(content: bytes, headers: Mapping[str, str]) -> float:
    """A sequence's score, or its last token's."""
    (item,) = json.loads(content)["data"]
    data = item["data"]
    score = data[-1] if isinstance(data[-1], list) else data
    if len(score) != 1:
        raise ValueError(f"expected a reward model, with one number for a conversation, got {len(score)}")
    return checked(score[0], "the judge")


def read_chat(content: bytes, headers: Mapping[str, str]) -> float:
    text = json.loads(content)["choices"][0]["message"]["content"]
    try:
        return checked(json.loads(text)["score"], "the judge")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected JSON with a 'score', got {str(text)[-200:]!r} ({error})") from error
