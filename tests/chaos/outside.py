"""The recorder, a process of its own: a steady load of requests, the fleet's events, and its state.

    python -m tests.chaos.outside URL MODEL FILE --clients 4

Writes a line of JSON for whatever it sees. Ends when its input is closed, after the last request.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any, TextIO

import aiohttp

TIMEOUT_S = 200.0  # of one request: longer than any fault of a case
POLL_S = 0.1
PAUSE_S = 0.3  # after a refusal
MAX_TOKENS = 120


class Recorder:
    """Everything that is seen goes into one file, a line each."""

    def __init__(self, session: aiohttp.ClientSession, model: str, file: TextIO) -> None:
        self._session = session
        self._model = model
        self._file = file
        self._requests = 0
        self.stopped = False

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()

    async def client(self, seed: int) -> None:
        """Requests one after the other, plain and streamed in turn."""
        choose = random.Random(seed)
        while not self.stopped:
            self._requests += 1
            seen = await self._ask(self._requests, choose, stream=self._requests % 2 == 0)
            self.write("answer", **seen)
            if seen["status"] != 200 or seen["error"]:
                await asyncio.sleep(PAUSE_S)

    async def events(self) -> None:
        """The events, from the first one; reconnects where it stopped."""
        since = 0
        while not self.stopped:
            try:
                async with self._session.get(
                    f"/fleet/events?since={since}", timeout=aiohttp.ClientTimeout(total=None, sock_read=15)
                ) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            data = json.loads(line[6:])
                            since, name, at = data.pop("id"), data.pop("event"), data.pop("at")
                            self.write("event", event_id=since, at=at, name=name, fields=data)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                pass
            await asyncio.sleep(0.1)

    async def states(self) -> None:
        """`/fleet`, again and again."""
        while not self.stopped:
            began = time.time()
            try:
                async with self._session.get("/fleet", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    fleet = await answer.json() if answer.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                fleet = None
            if fleet is not None:
                serving = {
                    each["replica_id"]: each["version"]
                    for each in fleet["members"]
                    if each["admitted"] and each["state"] == "serving"
                }
                open_round = fleet["round"]
                self.write(
                    "fleet",
                    at=began,
                    version=fleet["committed_version"],
                    phase=None if open_round is None else open_round["phase"],
                    serving=serving,
                )
            await asyncio.sleep(POLL_S)

    async def _ask(self, request_id: int, choose: random.Random, *, stream: bool) -> dict[str, Any]:
        wanted = choose.randrange(8, MAX_TOKENS)
        seen: dict[str, Any] = {
            "request_id": request_id,
            "start": time.time(),
            "stream": stream,
            "status": 0,
            "wanted": wanted,
            "spans": [],
            "tokens": [],
            "error": "",
        }
        self.write("began", request_id=request_id, at=seen["start"])
        body = {
            "model": self._model,
            "prompt": [choose.randrange(10, 250) for _ in range(choose.randrange(1, 60))],
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        try:
            async with self._session.post(
                "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as answer:
                seen["status"] = answer.status
                seen["replica"] = answer.headers.get("x-slipstream-replica", "")
                if answer.status != 200:
                    seen["error"] = (await answer.text())[:300]
                elif stream:
                    await self._read_stream(answer, seen)
                else:
                    self._read_event(await answer.json(), seen)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        seen["end"] = time.time()
        return seen

    async def _read_stream(self, answer: aiohttp.ClientResponse, seen: dict[str, Any]) -> None:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                self._read_event(json.loads(line[6:]), seen)
            elif line.startswith(b"data: [DONE]"):
                return
        if not seen["error"]:
            seen["error"] = "the stream ended early"

    @staticmethod
    def _read_event(data: dict[str, Any], seen: dict[str, Any]) -> None:
        if "error" in data:
            seen["error"] = str(data["error"])[:300]
            return
        for choice in data["choices"]:
            tokens = choice.get("token_ids") or []
            seen["tokens"] += tokens
            seen["spans"] = choice.get("weight_versions") or seen["spans"]
            seen["finish"] = choice.get("finish_reason")
        seen["version"] = data.get("weight_version", seen.get("version"))


async def record(url: str, model: str, file: TextIO, clients: int) -> None:
    """Record until the input ends."""
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        recorder = Recorder(session, model, file)
        watching = [asyncio.create_task(recorder.events()), asyncio.create_task(recorder.states())]
        load = [asyncio.create_task(recorder.client(seed)) for seed in range(clients)]
        await asyncio.to_thread(sys.stdin.read)
        recorder.stopped = True
        await asyncio.gather(*load)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with open(options.file, "w", encoding="utf-8") as file:
        asyncio.run(record(options.url, options.model, file, options.clients))


if __name__ == "__main__":
    main()
