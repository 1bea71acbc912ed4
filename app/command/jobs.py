"""RL jobs of the running fleet, through Ray's job API: `slipstream jobs`, `slipstream jobs stop`."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self, TypeVar

import typer

from app.command.shell import reported

if TYPE_CHECKING:
    from app.command.tables import FittedTable

DASHBOARD_PORT = 8265  # Ray's, where jobs are submitted
KIND = "slipstream"  # metadata that marks our jobs among others
LIVE = ("PENDING", "RUNNING")
STOPPED_S = 8.0  # deadline for a job to stop
ANSWER_S = 30.0
_POLL_S = 0.25

T = TypeVar("T")


class JobsError(RuntimeError):
    """Ray's dashboard refused, or did not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    job_id: str
    status: str  # Ray's: PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    message: str
    started: float  # seconds since 1970
    metadata: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    def line(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started))
        by = f" by {self.metadata['user']}" if self.metadata.get("user") else ""
        return f"{self.job_id} ({self.status.lower()}, started {since}{by})"


class Jobs(Protocol):
    """The jobs of one Ray cluster."""

    async def list(self) -> list[Job]:
        """All RL jobs, oldest first."""

    async def get(self, job_id: str) -> Job: ...

    async def submit(
        self, job_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None: ...

    async def stop(self, job_id: str) -> None:
        """Request a stop; no error if the job has ended or never began."""

    def log(self, job_id: str) -> AsyncIterator[str]:
        """Its whole output, until it ends. Raises JobsError: the connection broke."""


class RayJobs:
    """Ray's job API over HTTP. Ray's own client has no deadlines, limits a log's message to 4 MB, prints, and
    takes 1 s of CPU to import."""

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        import aiohttp  # slow to import

        token = environment.get("RAY_AUTH_TOKEN")
        self.address = address
        self._http = aiohttp.ClientSession(
            base_url=address.rstrip("/") + "/",
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def list(self) -> list[Job]:
        details = await self._send("GET", "api/jobs/")
        jobs = [_job(each) for each in details if (each.get("metadata") or {}).get("kind") == KIND]
        return sorted(jobs, key=lambda job: (job.started, job.job_id))

    async def get(self, job_id: str) -> Job:
        return _job(await self._send("GET", f"api/jobs/{job_id}"))

    async def submit(
        self, job_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        body: dict[str, Any] = {
            "submission_id": job_id,
            "entrypoint": entrypoint,
            "runtime_env": dict(runtime_env),
            "metadata": {"kind": KIND, **metadata},
        }
        if "working_dir" in runtime_env:
            await asyncio.to_thread(_upload_and_submit, self.address, body)
        else:
            await self._send("POST", "api/jobs/", body)

    async def stop(self, job_id: str) -> None:
        await self._send("POST", f"api/jobs/{job_id}/stop", may_miss=True)

    async def log(self, job_id: str) -> AsyncIterator[str]:
        import aiohttp

        path = f"api/jobs/{job_id}/logs/tail"
        with _translated(self.address):
            async with self._http.ws_connect(path, max_msg_size=0) as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data
                if socket.close_code != aiohttp.WSCloseCode.OK:
                    raise JobsError(f"Ray at {self.address} broke off the log ({socket.close_code})")

    async def _send(self, method: str, path: str, body: Any = None, *, may_miss: bool = False) -> Any:
        with _translated(self.address):
            async with self._http.request(method, path, json=body) as answer:
                if answer.ok:
                    return await answer.json()
                if may_miss and answer.status == 404:
                    return None
                text = (await answer.text()).strip()
                last = text.splitlines()[-1] if text else ""  # below the server's traceback
                raise JobsError(f"Ray at {self.address} refuses ({answer.status}): {last}")


def _upload_and_submit(address: str, body: dict[str, Any]) -> None:
    from ray.job_submission import JobSubmissionClient  # packs the directory; slow to import

    os.environ["RAY_API_SERVER_ADDRESS"] = address  # else RAY_ADDRESS wins
    logging.disable(logging.INFO)  # its loggers set their own levels
    try:
        JobSubmissionClient(address).submit_job(**body)
    except (RuntimeError, ValueError, ConnectionError) as error:
        raise JobsError(f"Ray at {address} refuses: {str(error).strip().splitlines()[-1]}") from error
    finally:
        logging.disable(logging.NOTSET)


def _job(details: Mapping[str, Any]) -> Job:
    return Job(
        job_id=details["submission_id"],
        status=details["status"],
        message=details.get("message") or "",
        started=(details.get("start_time") or 0) / 1000,
        metadata=details.get("metadata") or {},
        exit_code=details.get("driver_exit_code"),
    )


@contextmanager
def _translated(address: str) -> Iterator[None]:
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number else str(error) or type(error).__name__
        raise JobsError(
            f"Ray's dashboard does not answer at {address} ({why}): RAY_API_SERVER_ADDRESS gives its address"
        ) from error


async def end(jobs: Jobs, job_id: str, within_s: float = STOPPED_S) -> Job:
    """Stop a job and wait until it has ended. Repeats the request, which Ray ignores while it starts the job.

    Raises:
        JobsError: the deadline passed, or Ray did not respond.
    """
    failed = JobsError(f"RL job {job_id} has not ended within {within_s:g} s")
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                try:
                    await jobs.stop(job_id)
                    job = await jobs.get(job_id)
                    if not job.is_live:
                        return job
                except JobsError as error:
                    failed = error
                await asyncio.sleep(_POLL_S)
    raise JobsError(f"{failed}: it may go on training, `slipstream jobs stop {job_id}` asks again")


def dashboard() -> str:
    return os.environ.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{DASHBOARD_PORT}")


cli = typer.Typer(help="The RL jobs of the running fleet.", invoke_without_command=True)


@cli.callback()
def listed(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """List RL jobs, oldest first."""
    if context.invoked_subcommand is not None:
        return
    found = _answered(lambda jobs: jobs.list())
    if as_json:
        print(json.dumps([asdict(job) for job in found], indent=2))
        return
    if not found:
        print("No RL job: `slipstream rl` submits one")
        return
    from app.command.tables import console

    console().print(table(found))


def table(found: Sequence[Job]) -> "FittedTable[Job]":
    """One row per job."""
    from app.command.tables import Column, FittedTable, clock  # rich is slow to import

    return FittedTable(
        found,
        Column("job", lambda job: job.job_id),
        Column("status", lambda job: job.status.lower()),
        Column("started", lambda job: clock(job.started)),
        Column("user", lambda job: job.metadata.get("user", "")),
        Column("options", lambda job: job.metadata.get("options", "")),
    )


@cli.command("stop")
def stop(
    job_id: Annotated[
        str | None, typer.Argument(help="of `slipstream jobs`; none: the one that runs")
    ] = None,
) -> None:
    """Stop an RL job."""

    async def stopped(jobs: Jobs) -> str:
        name = job_id
        if name is None:
            live = [job.job_id for job in await jobs.list() if job.is_live]
            if len(live) != 1:
                raise JobsError(f"{', '.join(live)} run: name one" if live else "no RL job runs")
            (name,) = live
        before = await jobs.get(name)
        if not before.is_live:
            raise JobsError(f"RL job {name} has ended already ({before.status.lower()})")
        await end(jobs, name)
        return name

    print(f"Stopped RL job {_answered(stopped)}")


def _answered(ask: Callable[[Jobs], Awaitable[T]]) -> T:
    """Run one query; on failure print a sentence and exit with 1."""

    async def answer() -> T:
        async with RayJobs(dashboard()) as jobs:
            return await ask(jobs)

    with reported(JobsError):
        return asyncio.run(answer())
