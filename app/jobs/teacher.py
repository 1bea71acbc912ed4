"""A teacher: another model that scores the policy's samples, or samples in its place.

The learner asks it for a step's groups after the fleet's ledger has noted them: a failing teacher ends the
job, and --resume scores the same groups.
"""

import asyncio
import base64
import json
import math
import os
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from statistics import fmean
from typing import Any, TypeVar

from app.client import calls, completions
from app.client.completions import Answer, Completion
from app.client.connection import AsyncFleetClient, Call, FleetError
from app.jobs.options import JobOptions
from app.jobs.policy import Policy, Unanswered, image_urls, is_too_long
from app.jobs.task_groups import all_of
from trainers.trajectory import TeacherLogprobs, Trajectory

T = TypeVar("T")
AT_ONCE = 64  # requests
TIMEOUT_S = 600.0  # per request
PATIENCE_S = 300.0  # it may be restarted
TOKEN = "SLIPSTREAM_TEACHER_TOKEN"
# Scripts, digits and spaces that tokenizers cut differently.
PROBE = "def f(x):\n\treturn x ** 2  # 1234567890 naïve Grüße, Привет, 你好, مرحبا 😀"
PLACEHOLDER = "<|image_pad|>"  # the only image families that a trainer reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Args:
    client: of its server: vLLM's, or the fleet's own.
    model: its name there; NAME@-K is the fleet's adapter NAME, K versions before the policy's.
    top_k: log-probabilities of each token; 0: of the sampled one alone.
    kl: times log(teacher / policy) of a token is added to its advantage.
    """

    client: AsyncFleetClient
    model: str
    top_k: int
    kl: float

    def name(self, version: int) -> str:
        """At this version of the policy."""
        name, lags, behind = self.model.rpartition("@-")
        return f"{name}@{max(1, version - int(behind))}" if lags else self.model

    async def ask(self, call: Call[T]) -> T:
        """Raises FleetError, which names it."""
        try:
            return await self.client.send(call)
        except FleetError as error:
            url = str(self.client.http.base_url).rstrip("/")
            token = f". Its token is expected in {TOKEN}" if error.status == 401 else ""
            said = f"the teacher {self.model or 'model'} at {url}: {error}{token}"
            raise FleetError(
                f"{said}. Nothing is lost: continue with --resume",
                message=said,
                status=400 if error.status == 400 else None,  # another one is the fleet's
            ) from error

    async def check(self, policy: Policy, version: int) -> None:
        """Raises FleetError or ValueError: no answer, another vocabulary, or it lags an adapter other than
        the trained one, whose versions are counted."""
        name = self.name(version)
        if name != self.model and not (policy.is_adapter and self.model.startswith(f"{policy.model}@-")):
            raise ValueError(
                f"--teacher: expected NAME@-K of the adapter that is trained, got {self.model!r}, and "
                f"{policy.model!r} is trained: name a version, NAME@VERSION"
            )
        ours = await policy.client.send(calls.tokenize(policy.model, PROBE))
        theirs = await self.ask(calls.tokenize(name, PROBE))
        if ours != theirs:
            raise ValueError(
                f"--teacher: expected one with {policy.model}'s vocabulary, got {self.model}: one text has "
                f"{len(ours)} tokens in the former, {str(ours)[:60]}..., and {len(theirs)} in the latter, "
                f"{str(theirs)[:60]}..."
            )
        probe = Trajectory(
            prompt_token_ids=tuple(ours[:1]), token_ids=tuple(ours[1:]), logprobs=(), advantage=0.0
        )
        await self._score(probe, name)

    async def score(self, batch: Sequence[Trajectory], version: int) -> tuple[list[Trajectory], float]:
        """Scores the batch, leaves out what exceeds its context, and returns the mean of log(policy /
        teacher) over learned tokens, an estimate of KL(policy || teacher). Raises FleetError."""
        free = asyncio.Semaphore(AT_ONCE)
        name = self.name(version)
        placeholder = await self._placeholder(name) if any(each.images for each in batch) else None

        async def one(each: Trajectory) -> tuple[Trajectory, list[float]] | None:
            try:
                async with free:
                    best, own = await self._score(each, name, placeholder)
            except FleetError as error:
                if is_too_long(error):  # it needs one token more than the policy, which may fill its own
                    return None
                raise
            # With a constrained choice the rollout's log-probability is not the policy's.
            limited = each.constrained or (False,) * len(own)
            gaps = [
                0.0 if fewer else mine - its
                for mine, its, fewer in zip(each.logprobs, own, limited, strict=True)
            ]
            if self.kl:
                given = each.advantage if isinstance(each.advantage, tuple) else (each.advantage,) * len(own)
                each = replace(
                    each, advantage=tuple(a - self.kl * gap for a, gap in zip(given, gaps, strict=True))
                )
            learned = list(gaps if each.loss_mask is None else compress(gaps, each.loss_mask))
            return (replace(each, teacher=best) if self.top_k else each), learned

        made = [each for each in await all_of(map(one, batch)) if each is not None]
        found = [gap for _, gaps in made for gap in gaps]
        return [each for each, _ in made], fmean(found) if found else 0.0

    async def _placeholder(self, name: str) -> int:
        """Raises FleetError: the teacher takes no images."""
        tokens = await self.ask(calls.tokenize(name, PLACEHOLDER))
        if len(tokens) != 1:
            raise FleetError(
                f"the teacher {self.model}: expected one that reads images, got one without a token "
                f"{PLACEHOLDER}"
            )
        return tokens[0]

    async def _score(
        self, each: Trajectory, name: str, placeholder: int | None = None
    ) -> tuple[TeacherLogprobs, list[float]]:
        ids, prompt = [*each.prompt_token_ids, *each.token_ids], len(each.prompt_token_ids)
        asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": self.top_k}
        path, body = "/v1/completions", {"model": name, "prompt": ids, **asked}
        if each.images:  # the teacher's processor expands each again
            assert placeholder is not None
            path = "/inference/v1/generate"
            body = {
                "model": name,
                "token_ids": collapsed(ids, placeholder, len(each.images)),
                "content_parts": [{"type": "image_url", "url": data_url(file)} for file in each.images],
                "sampling_params": asked,
                "return_token_ids": True,
            }
        return await self.ask(
            Call(
                method="POST",
                path=path,
                body=body,
                read=lambda content, _: read_scores(content, ids, prompt, self.top_k),
            )
        )


def collapsed(ids: Sequence[int], placeholder: int, images: int) -> list[int]:
    """One placeholder per image, as before processing."""
    made: list[int] = []
    for token, run in groupby(ids):
        is_image = token == placeholder and images > 0
        images -= is_image
        made += [token] if is_image else run
    return made


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def read_scores(
    content: bytes, ids: list[int], prompt: int, top_k: int
) -> tuple[TeacherLogprobs, list[float]]:
    """From an answer of `/v1/completions` or `/inference/v1/generate`: the `top_k` most probable tokens at
    each token after the prompt, and its own log-probability. Raises ValueError or KeyError."""
    answer = json.loads(content)
    rows = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    if len(rows) != len(ids):
        raise ValueError(f"expected prompt_logprobs of {len(ids)} tokens, got {len(rows)}")
    if answer.get("prompt_token_ids", ids) != ids:
        raise ValueError("expected a processor that places images as the policy's does, got other tokens")
    best_ids, best, own = array("i"), array("f"), []
    for token, row in zip(ids[prompt:], rows[prompt:], strict=True):
        scores = {int(other): float(entry["logprob"]) for other, entry in row.items()}
        if token not in scores or len(scores) < top_k or not all(map(math.isfinite, scores.values())):
            raise ValueError(
                f"expected {top_k} finite log-probabilities and that of token {token}, got {str(scores)[:99]}"
            )
        own.append(scores[token])
        chosen = sorted(scores, key=lambda each: -scores[each])[:top_k]
        best_ids.extend(chosen)
        best.extend(scores[each] for each in chosen)
    return TeacherLogprobs(top_k=max(1, top_k), token_ids=best_ids.tobytes(), logprobs=best.tobytes()), own


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTeacher(Policy):
    """Continues prompts in the policy's place, outside the fleet's ledger.

    Attributes:
        made: sequences by attempt; a turn that continues one is a part of it.
    """

    student: Policy
    teacher: Teacher
    made: dict[str, list[Trajectory]] = field(default_factory=dict)

    async def chat(self, messages: Sequence[Mapping[str, Any]], attempts: Sequence[str]) -> Sequence[Answer]:
        """Raises as `forward`, and Unanswered for a conversation that exceeds the teacher's context, or an
        image that it cannot read."""
        settings, sees = self._sampling() | {"n": len(attempts)}, bool(image_urls(messages))
        if sees:  # which token ids lack: the teacher's chat template renders them
            call = completions.chat(settings | {"model": self.model, "messages": list(messages)})
        else:
            prompt = await self.tokenize(messages)
            call = completions.complete(self.model, prompt, **settings | {"ignore_eos": False})
        try:
            return (await self.forward(call, "", ",".join(attempts))).answers
        except FleetError as error:
            if is_too_long(error) or (sees and error.status == 400):
                raise Unanswered(error.message) from error
            raise

    async def tokenize(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """With the policy's chat template."""
        return await self.student.tokenize(messages)

    async def forward(self, call: Call[Completion], session: str, attempt: str) -> Completion:
        """Raises ValueError for the address of an image, and FleetError; its status is 400 if the teacher
        refuses this request."""
        body, attempts = call.body or {}, attempt.split(",")
        images = image_files(body.get("messages", ()))
        completion = await self.teacher.ask(call)
        answers = completion.answers
        if len(answers) != len(attempts) or not all(answer.token_ids for answer in answers):
            raise FleetError(
                f"the teacher {self.model}: expected {len(attempts)} answers with token_ids, got "
                f"{[len(answer.token_ids) for answer in answers]} of them"
            )
        prompt = tuple(body.get("prompt") or body.get("token_ids") or completion.prompt_token_ids)
        for name, answer in zip(attempts, answers, strict=True):
            add_turn(self.made.setdefault(name, []), prompt, tuple(answer.token_ids), images)
        return completion


def image_files(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    urls = [each["url"] for each in image_urls(messages)]
    if far := [url for url in urls if not url.startswith("data:")]:
        raise ValueError(
            "expected files or data URLs of images, for a teacher that answers in the policy's place (--loss "
            f"sft), got {far[0][:80]!r}"
        )
    return tuple(base64.b64decode(url.partition(",")[2]) for url in urls)


def add_turn(
    sequences: list[Trajectory],
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    images: tuple[bytes, ...] = (),
) -> None:
    """Extends the sequence that the turn's prompt begins with, or adds one. `images`: of all the prompt."""
    before = Trajectory(prompt_token_ids=prompt, token_ids=(), logprobs=(), advantage=0.0, loss_mask=())
    for number, each in enumerate(sequences):
        if prompt[: len(each)] == each.prompt_token_ids + each.token_ids:
            before = sequences.pop(number)
            break
    told = prompt[len(before) :]
    tokens = before.token_ids + told + sampled
    assert before.loss_mask is not None
    mask = before.loss_mask + (False,) * len(told) + (True,) * len(sampled)
    logprobs = (0.0,) * len(tokens)
    sequences.append(replace(before, token_ids=tokens, logprobs=logprobs, loss_mask=mask, images=images))


@asynccontextmanager
async def opened(
    options: JobOptions, policy: Policy, version: int, say: Callable[[str], object]
) -> AsyncIterator[Teacher | None]:
    """Raises FleetError or ValueError."""
    if options.teacher is None:
        yield None
        return
    client, is_own, model = policy.client, "://" not in options.teacher, options.teacher
    if not is_own:
        address = options.teacher.rstrip("/").removesuffix("/v1")
        token = os.environ.get(TOKEN, "").strip() or None
        client = AsyncFleetClient.connect(
            address,
            token,
            timeout_s=TIMEOUT_S,
            patience_s=PATIENCE_S,
            at_once=AT_ONCE,
            say=lambda line: say(f"the teacher: {line}"),
        )
        model = options.teacher_model or ""
    try:
        top_k = options.teacher_top_k if options.distils else 0
        teacher = Teacher(client=client, model=model, top_k=top_k, kl=options.teacher_kl)
        if not model:
            teacher = replace(teacher, model=await teacher.ask(calls.model()))
        await teacher.check(policy, version)
        yield teacher
    finally:
        if not is_own:
            await client.http.aclose()
