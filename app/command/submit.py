"""Submits the RL job to the running fleet: `python -m app.command.submit [options of app.jobs.grpo]`.

Ctrl-C stops the job too: `ray job submit` alone would leave it running.
"""

import json
import os
import subprocess
import sys
import uuid

import httpx

from app.command.launch import DASHBOARD_PORT

_RAY_JOB = (sys.executable, "-m", "ray.scripts.scripts", "job")


def complaint(url: str) -> str | None:
    """Why no job can be submitted, in a sentence; None if the fleet is up."""
    try:
        answer = httpx.get(f"{url}/health", timeout=10, trust_env=False)
    except httpx.HTTPError:
        return f"no fleet answers at {url}: start one with `make serve`, and wait until it says that it is up"
    if answer.is_error:
        return f"the fleet at {url} is not ready ({answer.status_code}): {answer.text[:500]}"
    return None


def command(arguments: list[str], *, url: str, dashboard: str, job_id: str) -> list[str]:
    runtime = json.dumps({"env_vars": {"SLIPSTREAM_URL": url, "PYTHONUNBUFFERED": "1"}})
    return [
        *(*_RAY_JOB, "submit", "--address", dashboard, "--submission-id", job_id),
        *("--runtime-env-json", runtime, "--", sys.executable, "-m", "app.jobs.grpo", *arguments),
    ]


def main() -> int:
    url = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000").rstrip("/")
    dashboard = os.environ.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{DASHBOARD_PORT}")
    if (reason := complaint(url)) is not None:
        print(f"slipstream: {reason}", file=sys.stderr)
        return 1
    job_id = f"grpo-{uuid.uuid4().hex[:8]}"
    # Ray's client would join whatever cluster this names, not the one that the fleet runs in.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    submitted = command(sys.argv[1:], url=url, dashboard=dashboard, job_id=job_id)
    job = subprocess.Popen(submitted, env=environment)
    try:
        return job.wait()
    except KeyboardInterrupt:
        print(f"Stopping job {job_id}", flush=True)
        subprocess.run([*_RAY_JOB, "stop", "--address", dashboard, job_id], env=environment, timeout=60)
        return 130


if __name__ == "__main__":
    sys.exit(main())
