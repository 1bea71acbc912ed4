"""Submits the RL job to the running fleet: `slipstream rl [options of app.jobs]`.

    submit ─► print the job's output ─► its exit status
                 │
      Ctrl-C, SIGTERM, SIGHUP, a closed pipe: the job is stopped, and the fleet keeps its weights

`ray job submit` would leave the job running.
"""

import asyncio
import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.client.program_options import LOCAL_URL, arguments_of, parse
from app.client.run_display import EVENTS, STATUS_S, WORKING_DIR, Display
from app.command.jobs import Job, Jobs, JobsError, RayJobs, dashboard, end
from app.command.shell import reported, stop_signals
from app.jobs.options import JobOptions

_JOB = (sys.executable, "-P", "-m", "app.jobs")  # -P: modules of the job's directory do not shadow ours
_FIRST = "RL job:"  # first line of the job; Ray writes lines before it
STOP_WAIT_S = 5  # Ray's wait between SIGTERM and SIGKILL, in which the job draws its curve
SILENT_S = 60.0  # longest outage of Ray's dashboard
RETRY_S = 1.0
_LAST_LINES_S = 1.5  # deadline for the rest of a log after the job's end

Show = Callable[[str], object]  # prints one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    job_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str]


def submission(options: JobOptions, *, dashboard: str, token_file: str | None = None) -> Submission:
    """The job with these options. On this machine it runs in the user's directory, elsewhere in a copy of
    --working-dir.

    Args:
        dashboard: address to which it is submitted.
        token_file: for the job; arguments and Ray's dashboard would show a token. None: the cluster's.
    """
    variables = {
        EVENTS: "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),  # for the curve
        "PYTHONUNBUFFERED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
    }
    if token_file:
        variables["SLIPSTREAM_TOKEN_FILE"] = os.path.abspath(token_file)
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if options.working_dir is not None:
        runtime_env["working_dir"] = str(options.working_dir.absolute())
    elif urlsplit(dashboard).hostname in ("127.0.0.1", "::1", "localhost"):
        variables[WORKING_DIR] = str(Path.cwd())
    arguments = arguments_of(replace(options, working_dir=None))
    if options.url == LOCAL_URL:
        arguments.append(f"--url={LOCAL_URL}")  # overrides the cluster's environment
    return Submission(
        job_id=f"grpo-{uuid.uuid4().hex[:8]}",
        entrypoint=shlex.join([*_JOB, *arguments]),
        runtime_env=runtime_env,
        metadata={"user": _user(), "options": shlex.join(arguments)},
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def submit(arguments: Sequence[str]) -> int:
    """Run the job until it ends or a signal arrives; returns the exit status."""
    with reported(ValueError):
        options = parse(JobOptions, arguments, "slipstream rl")
        options.check()
    if options.dry_run:
        return subprocess.call([*_JOB, *arguments])
    from app.client import calls  # httpx is slow to import
    from app.client.connection import FleetError, without_credentials
    from app.command.asking import ANSWER_S, connected

    url, password = without_credentials(options.url)
    if password is not None:
        print(
            "slipstream: the fleet's address carries a token, which Ray would display: expected it in "
            "SLIPSTREAM_TOKEN where Ray was started, or in the file SLIPSTREAM_TOKEN_FILE",
            file=sys.stderr,
        )
        return 1
    print(f"Asking the fleet at {url} whether it is up", flush=True)
    try:
        with connected(url, ANSWER_S) as fleet:
            fleet.send(calls.health())
            try:
                fleet.send(calls.run_position("new"))  # refused where no rollouts are captured
            except FleetError as error:
                if error.status not in (401, 403):  # only the job may have the operator's token
                    raise
    except KeyboardInterrupt:
        return 130
    ray = dashboard()
    made = submission(
        replace(options, url=url), dashboard=ray, token_file=os.environ.get("SLIPSTREAM_TOKEN_FILE")
    )

    async def run() -> int:
        with Display() as display:
            async with RayJobs(ray) as jobs:
                return await run_job(jobs, made, display.line)

    try:
        return asyncio.run(run())
    except JobsError as error:
        print(f"slipstream: {error}", file=sys.stderr)
    except OSError:  # stdout is closed (`| head`); buffered output would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"slipstream: nobody reads the output, RL job {made.job_id} is stopped", file=sys.stderr)
    return 1


async def run_job(
    jobs: Jobs, made: Submission, show: Show, *, quiet_s: float = STATUS_S, retry_s: float = RETRY_S
) -> int:
    """Submit the job and print its output until it ends; returns the exit status. A signal or a closed stdout
    stops the job.

    Raises:
        JobsError: another job runs, Ray refused or did not respond, or the job did not stop.
    """
    asked = _first_signal()
    if others := [job for job in await jobs.list() if job.is_live]:
        raise _refusal(others[0])
    if asked.done():
        return 128 + asked.result()
    following = asyncio.ensure_future(_followed(jobs, made, show, quiet_s, retry_s))
    first: list[asyncio.Future[Any]] = [following, asked]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if following.done() and isinstance(following.exception(), JobsError | None):
        return following.result()
    if not asked.done():  # stdout is closed, or a bug
        await end(jobs, made.job_id)
        return following.result()
    number = asked.result()
    with suppress(OSError):  # the terminal is gone
        show(f"Stopping RL job {made.job_id} ({number.name})")
    try:
        await end(jobs, made.job_id)
        await asyncio.wait_for(following, _LAST_LINES_S)
    except OSError:  # also TimeoutError
        with suppress(OSError):
            show(f"RL job {made.job_id} was stopped")
    finally:
        following.cancel()
    return 128 + number


def _first_signal() -> "asyncio.Future[signal.Signals]":
    """Resolves with the first signal; later ones are ignored."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not asked.done():
            asked.set_result(number)

    for number in stop_signals():
        loop.add_signal_handler(number, note, number)
    return asked


def _refusal(other: Job) -> JobsError:
    return JobsError(
        f"RL job {other.line()} trains this fleet's weights: `slipstream jobs stop {other.job_id}` stops it"
    )


async def _followed(jobs: Jobs, made: Submission, show: Show, quiet_s: float, retry_s: float) -> int:
    """Submit the job and print its output; returns its exit status."""
    await jobs.submit(made.job_id, made.entrypoint, made.runtime_env, made.metadata)
    older = []
    for job in await jobs.list():
        if job.job_id == made.job_id:
            break
        older += [job] if job.is_live else []
    if older:  # submitted at the same time
        await end(jobs, made.job_id)
        raise _refusal(older[0])
    show(f"RL job {made.job_id} is submitted; Ctrl-C stops it")
    held: list[str] = []  # Ray's own output
    has_begun = asyncio.Event()
    waiting = asyncio.ensure_future(_announce_start(has_begun, show, quiet_s))
    try:
        async for line in _lines(jobs, made.job_id, show, retry_s):
            if line.startswith(_FIRST):
                has_begun.set()
            if has_begun.is_set():
                show(line)
            else:
                held.append(line)
    finally:
        waiting.cancel()
    job = await jobs.get(made.job_id)
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "STOPPED":
        show(f"RL job {made.job_id} was stopped")
    elif not has_begun.is_set():
        for line in [*held, job.message]:
            show(line)
    return job.exit_code or 1


async def _announce_start(has_begun: asyncio.Event, show: Show, quiet_s: float) -> None:
    began = time.monotonic()
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(has_begun.wait(), quiet_s)
            return
        show(f"Ray starts the job: {time.monotonic() - began:.0f} s")


async def _lines(jobs: Jobs, job_id: str, show: Show, retry_s: float) -> AsyncIterator[str]:
    """Lines of the job until it ends, over as many connections as it takes."""
    seen, rest = 0, ""  # characters read; an incomplete line
    silent_since: float | None = None
    while True:
        try:
            position = 0  # every connection starts from the first line
            async for piece in jobs.log(job_id):
                new = piece[max(0, seen - position) :]
                position += len(piece)
                if new:
                    seen, silent_since = position, None
                *lines, rest = (rest + new).split("\n")
                for line in lines:
                    yield line
            if not (await jobs.get(job_id)).is_live:
                if rest:
                    yield rest
                return
        except JobsError as error:
            if silent_since is None:
                silent_since = time.monotonic()
                show(f"{error}; RL job {job_id} goes on, asking again")
            if time.monotonic() - silent_since > SILENT_S:
                raise JobsError(f"{error}; `slipstream jobs` says whether RL job {job_id} runs") from error
        await asyncio.sleep(retry_s)
