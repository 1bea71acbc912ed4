"""A proxy between a client and the fleet: it records both, and a test may act before a call continues.

So the client runs as its users run it, and the test sees headers and bodies that the client does not show.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fake_http import JsonHandler, serving

TIMEOUT_S = 120.0
# Of one connection, or changed when the proxy reads the body.
NOT_PASSED_ON = (
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "host",
    "transfer-encoding",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and its answer; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    answer_headers: dict[str, str]
    answer: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def answer_json(self) -> Any:
        return json.loads(self.answer)


@dataclass(slots=True)
class Record:
    url: str
    calls: list[Call] = field(default_factory=list)

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path.partition("?")[0] == path]


@contextmanager
def recorded(url: str, before: Callable[[str, dict[str, str]], None] | None = None) -> Iterator[Record]:
    """A proxy of `url`, and what it saw.

    Args:
        before: called with the path and the headers of each request, before it is passed on.
    """
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as fleet:

        class Handler(JsonHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass_on()

            def do_POST(self) -> None:
                self._pass_on()

            def _pass_on(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers.get("content-length", 0)))
                if before is not None:
                    before(self.path, headers)
                passed = {name: value for name, value in headers.items() if name not in NOT_PASSED_ON}
                answer = fleet.request(self.command, self.path, content=body, headers=passed)
                record.calls.append(
                    Call(
                        path=self.path,
                        headers=headers,
                        body=body,
                        status=answer.status_code,
                        answer_headers=dict(answer.headers),
                        answer=answer.content,
                    )
                )
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in NOT_PASSED_ON:
                        self.send_header(name, value)
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

        with serving(Handler) as port:
            record = Record(f"http://127.0.0.1:{port}")
            yield record
