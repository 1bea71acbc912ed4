"""The RL job's program: `slipstream rl`, or `python -m app.jobs`. Prints a line before it loads anything
large."""

import os
import sys
import time
from collections.abc import Sequence

from app.client.announcement import announced
from app.client.program_options import parse, print_any_text
from app.client.run_display import STATUS_S
from app.jobs.options import JobOptions


def run(arguments: Sequence[str] | None = None, name: str | None = None) -> int:
    """The exit status; arguments as in `parse`."""
    began = time.monotonic()
    print_any_text()
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # rewards and environments, after our own packages
        options = parse(JobOptions, arguments, name)
        options.check()
    except (OSError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    # seconds; a minute from a cold disk
    with announced("RL job: loading its programs", STATUS_S):
        from app.jobs import grpo
    return grpo.run(options, began)


if __name__ == "__main__":
    sys.exit(run())
