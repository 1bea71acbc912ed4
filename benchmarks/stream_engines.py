"""Engines that only stream: after a step of the engine each of its requests gets one event, as vLLM sends it.

    python -m benchmarks.stream_engines PORT --rate 50

Answers any POST with `max_tokens` events; `--rate` is steps a second.
"""

import argparse
import asyncio
import re
from typing import cast

import uvloop

from deployments.protocol.rollouts import framed

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-weight-version: 3\r\n"
    b"transfer-encoding: chunked\r\n%b\r\n"
)
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1764000000,'
    b'"model":"model","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"token_ids":null,"prompt_token_ids":null}],"usage":null}\n\n'
)
# What a replica tells the router of one token in a captured stream.
SAID = b'[[12345],[[[12345,-1.2345678806304932]]],[["3",17]],null,null,null]\n'
DONE = b"data: [DONE]\n\n"
LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
TURN = re.compile(rb"(?i)\r\nx-slipstream-turn:")
TOKENS = re.compile(rb'"max_tokens": *(\d+)')  # at the end of a body, which is not parsed


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


# Head, events and end of an answer that is captured, or not.
PIECES = {
    False: (HEAD % b"", chunk(EVENT), chunk(DONE) + b"0\r\n\r\n"),
    True: (
        HEAD % b"x-slipstream-said: framed\r\n",
        chunk(framed(SAID, EVENT)),
        chunk(framed(b"", DONE)) + b"0\r\n\r\n",
    ),
}


class Engine:
    """The requests that run, and the steps that they share."""

    def __init__(self, rate: float) -> None:
        self._step_s = 1 / rate
        self._running: dict[Connection, int] = {}  # events that are left

    def begin(self, connection: "Connection", tokens: int) -> None:
        self._running[connection] = tokens

    def end(self, connection: "Connection") -> None:
        self._running.pop(connection, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time() - self._step_s)
            await asyncio.sleep(due - loop.time())
            for connection, left in list(self._running.items()):
                _, event, end = PIECES[connection.is_captured]
                if left > 0:
                    connection.transport.write(event)
                    self._running[connection] = left - 1
                else:
                    connection.transport.write(end)
                    del self._running[connection]


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bytes = bytearray()
        self.is_captured = False
        self._needed = 0  # bytes of the request that is arriving; 0: not known yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if not self._needed:
            head_end = self._bytes.find(b"\r\n\r\n")
            if head_end < 0:
                return
            self.is_captured = TURN.search(self._bytes, 0, head_end) is not None
            length = LENGTH.search(self._bytes, 0, head_end + 2)
            self._needed = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._bytes) < self._needed:
            return
        tokens = TOKENS.search(self._bytes, max(0, self._needed - 1000))
        self._bytes, self._needed = self._bytes[self._needed :], 0
        if tokens is None:  # a question about its health
            self.transport.write(HEALTHY)
        else:
            self.transport.write(PIECES[self.is_captured][0])
            self._engine.begin(self, int(tokens[1]))

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.end(self)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    engine = Engine(options.rate)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine), "127.0.0.1", options.port, backlog=4096
    )
    async with server:
        await engine.run()


if __name__ == "__main__":
    uvloop.run(main())
