"""HTTP servers in this process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    def body(self) -> Any:
        """What was sent; None: nothing."""
        length = int(self.headers.get("content-length", 0))
        return json.loads(self.rfile.read(length)) if length else None

    def answer(self, status: int, body: Any) -> None:
        self.answer_text(status, json.dumps(body), "application/json")

    def answer_text(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        return


@contextmanager
def serving(handler: type[JsonHandler]) -> Iterator[int]:
    """The port of a server on 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def answering(status: int, body: Any) -> Iterator[str]:
    """The address of a server that gives one answer to every GET."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.answer(status, body)

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"
