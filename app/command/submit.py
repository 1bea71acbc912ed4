"""Submits the RL job to the running fleet: `slipstream rl [options of app.jobs]`.

Ctrl-C stops the job too; `ray job submit` alone would leave it running.
"""

import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from typing import IO

from app.client import calls
from app.client.announcement import QUIET_S
from app.client.connection import FleetClient, FleetError, without_credentials
from app.client.program_options import LOCAL_URL
from app.command.doctor import local_addresses
from app.command.ports import DASHBOARD_PORT

_RAY_JOB = (sys.executable, "-m", "ray.scripts.scripts", "job")
_JOB = (sys.executable, "-m", "app.jobs")
_FIRST = b"RL job:"  # how the job's own output begins
_REPEATED = b", last available logs"  # then comes what was already printed


def why_not(url: str) -> str | None:
    """Why no job can be submitted; None if the fleet is up."""
    try:
        with FleetClient.connect(url, timeout_s=10.0) as fleet:
            fleet.send(calls.health())
    except FleetError as error:
        if error.status is None:
            return f"no fleet answers at {url}: start one with `make serve`, and wait until it is up"
        return f"the fleet at {url} is not ready ({error.status}): {error.message}"
    return None


def command(
    arguments: Sequence[str], *, url: str, dashboard: str, job_id: str, token_file: str | None = None
) -> list[str]:
    """The command that submits the job and prints its log until it ends.

    Args:
        token_file: for the job, which runs in the cluster; process arguments and Ray's dashboard would show a
            token. None: the job uses the cluster's.
    """
    variables = {"SLIPSTREAM_URL": url, "PYTHONUNBUFFERED": "1"}
    if token_file:
        variables["SLIPSTREAM_TOKEN_FILE"] = os.path.abspath(token_file)
    runtime = json.dumps({"env_vars": variables})
    return [
        *(*_RAY_JOB, "submit", "--address", dashboard, "--submission-id", job_id),
        *("--runtime-env-json", runtime, "--", *_JOB, *arguments),
    ]


def submit(arguments: Sequence[str]) -> int:
    """Run the job with these options until it ends or Ctrl-C; returns the exit status."""
    if "--help" in arguments:  # needs no fleet
        return subprocess.call([*_JOB, "--help"])
    url, password = without_credentials(os.environ.get("SLIPSTREAM_URL", LOCAL_URL))
    if password is not None:
        print(
            "slipstream: SLIPSTREAM_URL carries a token, which Ray would display: expected it in "
            "SLIPSTREAM_TOKEN where Ray was started, or in the file SLIPSTREAM_TOKEN_FILE",
            file=sys.stderr,
        )
        return 1
    dashboard = os.environ.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{DASHBOARD_PORT}")
    print(f"Asking the fleet at {url} whether it is up", flush=True)  # it may take seconds
    if (reason := why_not(url)) is not None:
        print(f"slipstream: {reason}", file=sys.stderr)
        return 1
    job_id = f"grpo-{uuid.uuid4().hex[:8]}"
    # Ray's client prefers RAY_ADDRESS, which may name another cluster than the fleet's.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["NO_PROXY"] = environment["no_proxy"] = local_addresses(environment)
    token_file = os.environ.get("SLIPSTREAM_TOKEN_FILE")
    submitted = command(arguments, url=url, dashboard=dashboard, job_id=job_id, token_file=token_file)
    print(f"Submitting RL job {job_id} to Ray at {dashboard}; Ctrl-C stops it", flush=True)
    job = subprocess.Popen(submitted, env=environment, stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        relay(job.stdout)
        return job.wait()
    except KeyboardInterrupt:
        print(f"Stopping job {job_id}", flush=True)
        subprocess.run([*_RAY_JOB, "stop", "--address", dashboard, job_id], env=environment, timeout=60)
        return 130


def relay(output: IO[bytes], quiet_s: float = QUIET_S) -> None:
    """Copy the job's output; until it writes, report that Ray is starting it.

    What Ray prints before it (a dozen lines on how to use `ray job`) is shown only if the job never begins,
    and what it repeats after a failure (20,000 characters of the same output) is not.
    """
    began, started, held = time.monotonic(), False, b""
    while True:
        ready, _, _ = select.select([output], [], [], None if started else quiet_s)
        if not ready:
            print(f"Ray starts the job: {time.monotonic() - began:.0f} s", flush=True)
            continue
        written = os.read(output.fileno(), 1 << 16)
        held += written
        if not started and (at := held.find(_FIRST)) >= 0:
            started, held = True, held[at:]
        if not started and written:
            continue
        shown, repeats, _ = held.partition(_REPEATED)
        sys.stdout.write(shown.decode(errors="replace") + ("\n" if repeats else ""))
        sys.stdout.flush()
        held = b""
        if not written or repeats:
            break
    while os.read(output.fileno(), 1 << 16):
        pass
