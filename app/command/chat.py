"""`slipstream chat`: a conversation with the fleet, with the weight version of each answer."""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.text import Text

from app.client import calls
from app.client.completions import Answer, Completion, chat, join
from app.client.connection import AsyncFleetClient, FleetClient, FleetError, token_from
from app.command.asking import ANSWER_S, explained
from app.command.tables import console


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    url: str
    model: str | None  # None: the fleet's
    max_tokens: int
    temperature: float
    system: str | None


def talk(options: ChatOptions) -> int:
    """Read prompts until end of input or Ctrl-C; returns the exit status."""
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    try:
        with FleetClient.connect(options.url, token_from(), timeout_s=ANSWER_S) as fleet:
            model = fleet.send(calls.model()) if options.model is None else options.model
        for prompt in filter(str.strip, _prompts()):
            messages.append({"role": "user", "content": prompt})
            began = time.monotonic()
            answer = asyncio.run(_answer(model, messages, options))  # input() in a loop misses Ctrl-C
            console().print(Text(_origin(answer, time.monotonic() - began), style="dim"))
            messages.append({"role": "assistant", "content": answer.text})
    except FleetError as error:
        print(f"slipstream: {explained(options.url, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _prompts() -> Iterator[str]:
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # line editing

        prompt = "> "
    with suppress(EOFError):
        while True:
            yield input(prompt)


async def _answer(model: str, messages: Sequence[Mapping[str, str]], options: ChatOptions) -> Answer:
    """Stream the answer to stdout; returns all of it."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "return_token_ids": True,
    }
    pieces: list[Completion] = []
    async with AsyncFleetClient.connect(options.url, token_from()) as fleet:
        async for piece in fleet.stream(chat(body)):
            pieces.append(piece)
            for answer in piece.answers:
                print(answer.text, end="", flush=True)
    print()
    return join(pieces)


def _origin(answer: Answer, took_s: float) -> str:
    versions = [span.version for span in answer.weight_versions]
    spans = f"versions {versions[0]} to {versions[-1]}" if len(versions) > 1 else f"version {answer.version}"
    adapter = "" if answer.adapter is None else f", adapter {answer.adapter}"
    tokens = len(answer.token_ids)
    return f"{spans}{adapter}, {tokens} tokens in {took_s:.1f} s, {answer.finish_reason}"
