"""The streams of a soak: `python -m benchmarks.soak_load URL FILE STREAMS`, until its input ends."""

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path

import aiohttp


async def streams(url: str, count: int) -> Counter[str]:
    """Keep `count` streams running until the input ends; how many were whole, bad and refused."""
    seen: Counter[str] = Counter(whole=0, bad=0, refused=0)
    stopped = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        clients = [asyncio.create_task(_client(session, model, seed, seen, stopped)) for seed in range(count)]
        await asyncio.to_thread(sys.stdin.read)
        stopped.set()
        await asyncio.gather(*clients)
    return seen


async def _client(
    session: aiohttp.ClientSession, model: str, seed: int, seen: Counter[str], stopped: asyncio.Event
) -> None:
    choose = random.Random(seed)
    while not stopped.is_set():
        outcome = await _stream(session, model, choose)
        seen[outcome] += 1
        if outcome != "whole":
            await asyncio.sleep(1.0)


async def _stream(session: aiohttp.ClientSession, model: str, choose: random.Random) -> str:
    """One stream; bad if it ends early, has an error, or its version is not that of its last token."""
    body = {
        "model": model,
        "prompt": [choose.randrange(10, 200) for _ in range(choose.randrange(4, 64))],
        "max_tokens": choose.choice([16, 64, 256]),
        "ignore_eos": True,
        "stream": True,
    }
    whole = False
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status == 503:
                return "refused"
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    choices = data.get("choices", [])
                    spans = [span for choice in choices for span in choice.get("weight_versions", [])]
                    whole = bool(spans) and spans[-1]["version"] == data["weight_version"]
                elif line.startswith(b"data: [DONE]"):
                    return "whole" if whole else "bad"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        print(f"soak: a stream failed: {error!r}", file=sys.stderr, flush=True)
    return "bad"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(streams(sys.argv[1], int(sys.argv[3])))))
