"""`python -m app.jobs [options]`: the RL job. It prints a line before it loads anything large."""

import sys
import time

from app.client.announcement import announced
from app.client.run_display import STATUS_S


def run() -> int:
    """The exit status of the job."""
    began = time.monotonic()
    if "--help" in sys.argv:
        from app.jobs import grpo
    else:
        # torch, reasoning-gym: seconds, and a minute from a cold disk
        with announced("RL job: loading its programs", STATUS_S):
            from app.jobs import grpo
    return grpo.run(began)


if __name__ == "__main__":
    sys.exit(run())
