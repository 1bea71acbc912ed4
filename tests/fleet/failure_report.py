"""What a fleet says of itself, for the report of a test that failed with it."""

import time
from contextlib import suppress
from pathlib import Path

import httpx
import ray

LINES = 40
ASK_S = 10.0


def serve_logs() -> Path:
    """Where the processes of this process's cluster write Serve's logs."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")


def last_events(client: httpx.Client) -> str:
    """The newest of `/fleet/events`, or why it does not answer."""
    lines: list[str] = []
    deadline = time.monotonic() + ASK_S
    try:
        with client.stream("GET", "/fleet/events?since=0", timeout=3.0) as answer:
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                if time.monotonic() > deadline:
                    break
    except httpx.ReadTimeout:  # there are no more
        pass
    except httpx.HTTPError as error:
        lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines[-LINES:])


def last_warnings() -> str:
    """The newest warnings and errors in Serve's logs; another test process may have a cluster of its own."""
    lines: list[str] = []
    for path in serve_logs().glob("*.log") if ray.is_initialized() else ():
        with suppress(OSError):
            text = path.read_text(errors="replace")
            lines += [
                f"{line}  [{path.stem}]" for line in text.splitlines() if line.startswith(("WARN", "ERROR"))
            ]
    return "\n".join(sorted(lines, key=lambda line: line.split()[1:3])[-LINES:])
