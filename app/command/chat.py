"""`slipstream chat`: a conversation with the fleet, with the weight version of each answer."""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from rich.text import Text

from app.client import calls
from app.client.completions import Answer, Completion, chat, join
from app.client.connection import AsyncFleetClient, token_from
from app.command.asking import ANSWER_S, connected
from app.command.tables import console


def talk(url: str, model: str | None, system: str | None, sampling: Mapping[str, float]) -> None:
    """Read prompts until end of input or Ctrl-C."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        with connected(url, ANSWER_S) as fleet:
            request = {"model": fleet.send(calls.model()) if model is None else model, **sampling}
            for prompt in filter(str.strip, _prompts()):
                messages.append({"role": "user", "content": prompt})
                began = time.monotonic()
                # A loop around input() would miss Ctrl-C.
                answer = asyncio.run(_answer(url, {**request, "messages": messages}))
                console().print(Text(_origin(answer, time.monotonic() - began), style="dim"))
                messages.append({"role": "assistant", "content": answer.text})
    except KeyboardInterrupt:
        print()


def _prompts() -> Iterator[str]:
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # line editing

        prompt = "> "
    with suppress(EOFError):
        while True:
            yield input(prompt)


async def _answer(url: str, request: Mapping[str, object]) -> Answer:
    pieces: list[Completion] = []
    async with AsyncFleetClient.connect(url, token_from()) as fleet:
        async for piece in fleet.stream(chat({**request, "stream": True, "return_token_ids": True})):
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
