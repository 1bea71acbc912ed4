"""The RL job's program: `slipstream rl`, or `python -m app.jobs`. Prints a line before it loads anything
large."""

import os
import sys
import time
from collections.abc import Sequence

from app.client.announcement import announced
from app.client.program_options import parse, print_any_text
from app.jobs.options import JobOptions
from app.jobs.run_display import STATUS_S

ANSWER_S = 10.0


def require_fleet(url: str) -> None:
    """Raises ValueError."""
    from app.client import calls  # slow to import, but faster than the job
    from app.client.connection import FleetClient, FleetError, token_from

    try:
        with FleetClient.connect(url, token_from(), timeout_s=ANSWER_S) as fleet:
            fleet.send(calls.health())
    except FleetError as error:
        raise ValueError(
            f"{error}; start a fleet with `make serve`, wait until it is up, or give its address with --url"
        ) from error


def run(arguments: Sequence[str] | None = None, name: str | None = None) -> int:
    began = time.monotonic()
    print_any_text()
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # rewards and environments, after our own packages
        options = parse(JobOptions, arguments, name)
        options.check()
        if not options.dry_run:
            with announced("RL job: asking the fleet whether it is up", STATUS_S):
                require_fleet(options.url)
    except (OSError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    # seconds; a minute from a cold disk
    with announced("RL job: loading its programs", STATUS_S):
        from app.jobs import grpo
    return grpo.run(options, began)


if __name__ == "__main__":
    sys.exit(run())
