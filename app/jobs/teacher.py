"""A teacher: another model that scores what the policy has sampled, or samples in its place.

The learner asks it for the groups of a step, after the fleet's ledger has noted that the step has them: a
teacher that fails ends the job, and the same groups are scored after --resume.
"""

import asyncio
import json
import math
import os
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean
from typing import TypeVar

from app.client import calls, completions
from app.client.completions import Answer
from app.client.connection import AsyncFleetClient, Call, FleetError
from app.jobs.options import JobOptions
from app.jobs.policy import Policy, Unanswered, is_too_long
from app.jobs.task_groups import all_of
from trainers.trajectory import TeacherLogprobs, Trajectory

T = TypeVar("T")
AT_ONCE = 64  # requests
TIMEOUT_S = 600.0  # of one request
PATIENCE_S = 300.0  # it may be restarted
TOKEN = "SLIPSTREAM_TEACHER_TOKEN"
# Scripts, digits and spaces that tokenizers cut differently.
PROBE = "def f(x):\n\treturn x ** 2  # 1234567890 naïve Grüße, Привет, 你好, مرحبا 😀"


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
        """Its model's, when the policy has this version."""
        name, lags, behind = self.model.rpartition("@-")
        return f"{name}@{max(1, version - int(behind))}" if lags else self.model

    async def ask(self, call: Call[T]) -> T:
        """Raises FleetError, which names it."""
        try:
            return await self.client.send(call)
        except FleetError as error:
            url = str(self.client.http.base_url).rstrip("/")
            token = f". Its token is expected in {TOKEN}" if error.status == 401 else ""
            raise FleetError(
                f"the teacher {self.model} at {url}: {error}{token}. Nothing is lost: continue with --resume"
            ) from error

    async def check(self, policy: Policy, version: int) -> None:
        """Raises FleetError or ValueError: it does not answer, has another vocabulary, or lags behind another
        adapter than the one that is trained, whose versions are counted."""
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
        await self._score(ours[:1], ours[1:], name)

    async def score(self, batch: Sequence[Trajectory], version: int) -> tuple[list[Trajectory], float]:
        """The batch with its log-probabilities, without what exceeds its context, and the mean of log(policy
        / teacher) over learned tokens, an estimate of KL(policy || teacher). Raises FleetError."""
        if any(each.images for each in batch):
            raise FleetError("a teacher reads text alone, and these rollouts have images")
        free = asyncio.Semaphore(AT_ONCE)
        name = self.name(version)

        async def one(each: Trajectory) -> tuple[Trajectory, list[float]] | None:
            try:
                async with free:
                    best, own = await self._score(each.prompt_token_ids, each.token_ids, name)
            except FleetError as error:
                if _is_too_long(error):  # it needs one token more than the policy, which may fill its own
                    return None
                raise
            # Of a choice among fewer tokens the rollout's log-probability is not the policy's.
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

    async def _score(
        self, prompt: Sequence[int], tokens: Sequence[int], name: str
    ) -> tuple[TeacherLogprobs, list[float]]:
        ids = [*prompt, *tokens]
        body = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.top_k}
        return await self.ask(
            Call(
                method="POST",
                path="/v1/completions",
                body=body,
                read=lambda content, _: read_scores(content, ids, len(prompt), self.top_k),
            )
        )


def _is_too_long(error: FleetError) -> bool:
    return isinstance(error.__cause__, FleetError) and is_too_long(error.__cause__)


def read_scores(
    content: bytes, ids: Sequence[int], prompt: int, top_k: int
) -> tuple[TeacherLogprobs, list[float]]:
    """The `top_k` most probable tokens at each token after the prompt, and its own log-probability, of an
    answer of `/v1/completions`. Raises ValueError or KeyError."""
    (choice,) = json.loads(content)["choices"]
    rows = choice["prompt_logprobs"]
    if len(rows) != len(ids):
        raise ValueError(f"expected prompt_logprobs of {len(ids)} tokens, got {len(rows)}")
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
    """Continues the policy's prompts in its place; the fleet's ledger has none of that.

    Attributes:
        made: trajectories by attempt.
    """

    student: Policy
    teacher: Teacher
    made: dict[str, Trajectory] = field(default_factory=dict)

    async def chat(self, messages: Sequence[Mapping[str, str]], attempts: Sequence[str]) -> Sequence[Answer]:
        """Raises FleetError, or Unanswered for a conversation that exceeds the teacher's context."""
        prompt = await self.student.tokenize(messages)
        settings = self._sampling() | {"ignore_eos": False, "n": len(attempts)}
        try:
            answers = (await self.teacher.ask(completions.complete(self.model, prompt, **settings))).answers
        except FleetError as error:
            if _is_too_long(error):
                raise Unanswered(str(error)) from error
            raise
        if len(answers) != len(attempts) or not all(answer.token_ids for answer in answers):
            raise FleetError(
                f"the teacher {self.model}: expected {len(attempts)} answers with token_ids, got "
                f"{[len(answer.token_ids) for answer in answers]} of them"
            )
        for attempt, answer in zip(attempts, answers, strict=True):
            tokens = tuple(answer.token_ids)
            self.made[attempt] = Trajectory(
                prompt_token_ids=tuple(prompt), token_ids=tokens, logprobs=(0.0,) * len(tokens), advantage=0.0
            )
        return answers


@asynccontextmanager
async def opened(
    options: JobOptions, policy: Policy, version: int, say: Callable[[str], object]
) -> AsyncIterator[Teacher | None]:
    """The teacher of --teacher, checked. Raises FleetError or ValueError."""
    if options.teacher is None:
        yield None
        return
    client, is_own, model = policy.client, "://" not in options.teacher, options.teacher
    if not is_own:
        address = options.teacher.rstrip("/").removesuffix("/v1")
        token = os.environ.get(TOKEN, "").strip() or None
        client = AsyncFleetClient.connect(
            address, token, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S, at_once=AT_ONCE, say=say
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
