"""Tasks: prompts, and scores of answers.

The default is reasoning-gym's `chain_sum` with two one-digit terms; the built-in model solves one in ten.
Examples in the prompt would make answers of a group alike.
"""

import base64
import json
import mimetypes
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.client.completions import Answer
from app.jobs.environments.environment import Message, Problem, Task
from app.jobs.options import Extraction
from app.jobs.policy import image_urls
from app.jobs.rewards import Reward, checked

_URLS = ("data:", "http:", "https:")  # other than paths


class ReasoningGymTask(Task):
    def __init__(
        self, name: str, settings: Mapping[str, Any], *, instruction: str, seed: int, extract: Extraction
    ) -> None:
        with warnings.catch_warnings():  # foreign code's syntax warnings
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym

        # reasoning-gym draws problem i from Random(seed + i): adjacent seeds would share problems.
        spread = (seed + 1) * 1_000_003
        try:
            self._entries = reasoning_gym.create_dataset(name, seed=spread, size=1 << 40, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning-gym refuses {name!r} with {dict(settings)}: {error}") from error
        self._extract = extract
        self._head = [_message("system", instruction)] if instruction else []

    def problem(self, number: int) -> Problem:
        entry = self._entries[number]
        source = str(entry.get("metadata", {}).get("source_dataset", ""))
        return Problem(
            messages=[*self._head, _message("user", entry["question"])], entry=entry, source=source
        )

    async def score(self, problem: Problem, answer: Answer) -> float:
        graded = self._extract.of(answer.text)
        return checked(self._entries.score_answer(graded, problem.entry), "reasoning-gym")


class PromptFileTask(Task):
    """Prompts of a JSON Lines file, repeated, with your own reward.

    A line has `messages`, or `prompt` (a text, or a conversation), whatever the reward needs, and a `source`.
    An `image_url` may be a path below the file's directory: the image goes to the fleet in its place. Raises
    ValueError, which names the line.
    """

    def __init__(self, path: Path, reward: Reward, *, extract: Extraction) -> None:
        self._reward = reward
        self._extract = extract
        # Not `splitlines`: JSON strings may have U+2028.
        lines = [
            (number, line) for number, line in enumerate(_text(path).split("\n"), start=1) if line.strip()
        ]
        self._prompts = [_prompt(path, number, line) for number, line in lines]
        if not self._prompts:
            raise ValueError(f"{path} must have at least one line, got none")

    @property
    def problems(self) -> int:
        return len(self._prompts)

    def problem(self, number: int) -> Problem:
        problem = self._prompts[number % len(self._prompts)]
        return replace(problem, messages=with_images(problem.messages))

    async def score(self, problem: Problem, answer: Answer) -> float:
        details = {
            "messages": [*problem.messages, _message("assistant", answer.text)],
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
        }
        return await self._reward(problem.entry, self._extract.of(answer.text), details)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line} must be JSON Lines in UTF-8: {error}") from error


def _prompt(path: Path, number: int, line: str) -> Problem:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number} must be a JSON object in one line: {error}") from error
    prompt = entry.get("messages") if isinstance(entry, dict) else None
    if isinstance(entry, dict) and prompt is None:
        prompt = entry.get("prompt")
        prompt = [_message("user", prompt)] if isinstance(prompt, str) else prompt
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError(
            f"{path}:{number} must be an object with 'messages' (objects with 'role' and 'content') or "
            f"'prompt' (a text, or such a list), got {line[:80]!r}"
        )
    try:
        json.dumps([prompt, entry.get("source")], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}:{number} must be text, got half of a surrogate pair: {error}") from error
    for url in image_urls(prompt):
        if not url["url"].startswith(_URLS):
            url["url"] = str(path.parent / url["url"])
        check_image(url["url"], f"{path}:{number}")
    source = entry.get("source")
    return Problem(messages=prompt, entry=entry, source=source if isinstance(source, str) else "")


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str | list) or (content is None and bool(value.get("tool_calls")))


def with_images(messages: Sequence[Message]) -> list[Message]:
    made = deepcopy(list(messages))
    for url in image_urls(made):
        if not url["url"].startswith(_URLS):
            content = base64.b64encode(Path(url["url"]).read_bytes()).decode()
            url["url"] = f"data:{mimetypes.guess_type(url['url'])[0] or 'image/png'};base64,{content}"
    return made


def check_image(url: str, place: str) -> None:
    """Raises ValueError: a trainer would refuse it."""
    from trainers.image_files import opened  # and PIL, which few tasks need

    if url.startswith(("http:", "https:")):
        return
    try:
        is_path = not url.startswith("data:")
        opened(Path(url).read_bytes() if is_path else base64.b64decode(url.partition(",")[2], validate=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} must have images that can be read, got {url[:80]!r}: {error}") from error


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
