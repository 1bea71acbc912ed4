"""Jobs that no Ray runs."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from app.command.jobs import Job, JobsError


class FakeJobs:
    """Each job prints `output` and then runs until it is stopped, or ends with `ends_as`.

    Args:
        ends_as: the status in which a job ends by itself; None: it does not.
        breaks_at: characters after which a connection to its log breaks off, once each.
        deaf: requests to stop that are ignored, as Ray does while it starts a job.
    """

    def __init__(
        self, output: str = "", ends_as: str | None = None, breaks_at: list[int] | None = None, deaf: int = 0
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.output = output
        self.ends_as = ends_as
        self.breaks_at = breaks_at or []
        self.deaf = deaf
        self.stopped: list[str] = []
        self.ended = asyncio.Event()

    def add(self, job_id: str, status: str = "RUNNING", started: float = 0.0) -> None:
        self.jobs[job_id] = Job(job_id=job_id, status=status, message="no such thing", started=started)

    async def list(self) -> list[Job]:
        return sorted(self.jobs.values(), key=lambda job: job.started)

    async def get(self, job_id: str) -> Job:
        return self.jobs[job_id]

    async def submit(
        self, job_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        self.add(job_id, started=100.0)

    async def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)
        if self.deaf:
            self.deaf -= 1
            return
        self.jobs[job_id] = replace(self.jobs[job_id], status="STOPPED")
        self.ended.set()

    async def log(self, job_id: str) -> AsyncIterator[str]:
        if self.breaks_at:
            yield self.output[: self.breaks_at.pop(0)]
            raise JobsError("Ray's dashboard does not answer")
        for at in range(0, len(self.output), 7):
            yield self.output[at : at + 7]
        if self.ends_as is not None:
            self.jobs[job_id] = replace(self.jobs[job_id], status=self.ends_as)
            return
        await self.ended.wait()
        yield "the curve\n"
