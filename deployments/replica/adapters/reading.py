"""Checks an adapter's files, and has the workers read them while the engine decodes.

read     the fleet's copy: checked here while the workers read it
arrived  files that a transport received into this host's memory: read ahead, before the load
         instruction, while the fleet's copy is still being written; `read` finds them done
"""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from deployments.host.logs import serve_logger
from deployments.host.shared_memory import DIRECTORY, owner
from deployments.protocol.adapters import Adapter
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapters.check import check_adapter, inspect
from deployments.replica.adapters.worker_calls import Workers
from deployments.weights.store.adapter_store import LAG_S, until_complete
from deployments.weights.store.hub import cached, complete_schema
from deployments.weights.wire.checkpoint_schema import Schema

READ_POLL_S = 0.01

logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """An adapter that is read before its load instruction."""

    load_id: str
    digest: "asyncio.Task[str]"  # done when the files are checked


class AdapterReader:
    """Has the workers read adapters; waits up to `lag_s` for files that differ from the fleet's copy."""

    def __init__(self, llm: Any, workers: Workers, lag_s: float = LAG_S) -> None:
        self._llm = llm
        self._workers = workers
        self._lag_s = lag_s
        self._directory: Path | None = None  # of received files; in shared memory, owned by this process
        self._ahead: _Ahead | None = None
        self._base: asyncio.Task[Schema | None] | None = None

    async def receive(self, load_id: str, payload: Any) -> None:
        directory = await self.place(load_id)
        await self._workers("staging_receive_files", payload=payload, directory=str(directory))

    async def place(self, load_id: str) -> Path:
        """The directory for an adapter's files; the previously received one is removed."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.digest.cancel()
            await asyncio.gather(ahead.digest, return_exceptions=True)
            await self._workers("adapter_forget", key=ahead.load_id, adapter_id=0)
        await self._drop_received()
        self._directory = DIRECTORY / owner().name(f"adapter-{load_id}")
        return self._directory

    def arrived(self, load_id: str) -> None:
        """The files are complete: start checking and reading them."""
        assert self._directory is not None, "arrived before `place`"
        digest = asyncio.create_task(self._read_ahead(load_id, self._directory))
        digest.add_done_callback(lambda done: done.cancelled() or done.exception())  # its load may not come
        self._ahead = _Ahead(load_id=load_id, digest=digest)

    async def read(self, adapter: Adapter) -> bool:
        """Check an adapter and have the workers read it; whether a transport received it. Raises
        PayloadRejected."""
        if await self._was_read_ahead(adapter):
            return True
        await self._begin(adapter.full_name, adapter.path, is_3d=adapter.is_3d)
        if not await self._check(adapter):
            # The workers may have read the files before they were complete.
            await self._begin(adapter.full_name, adapter.path, is_3d=adapter.is_3d)
        await self._until_read(adapter.full_name, adapter.adapter_id)
        return False

    async def forget(self, adapter: Adapter) -> None:
        await self._workers("adapter_forget", key=adapter.full_name, adapter_id=adapter.adapter_id)

    async def _drop_received(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _read_ahead(self, load_id: str, directory: Path) -> str:
        if not directory.is_dir():
            raise ValueError("not in this host's memory")
        await self._begin(load_id, str(directory), is_3d=False)
        digest, problem = await asyncio.to_thread(inspect, directory, *await self._limits())
        if problem:
            raise ValueError(problem)
        return digest

    async def _was_read_ahead(self, adapter: Adapter) -> bool:
        ahead = self._ahead
        if ahead is None or ahead.load_id != adapter.load_id:
            return False
        self._ahead = None
        try:
            digest = await ahead.digest
            if digest != adapter.digest:
                raise ValueError(f"received digest {digest}, expected {adapter.digest}")
            await self._until_read(ahead.load_id, adapter.adapter_id)
        except EngineDeadError:
            raise
        except Exception as error:  # e.g. a worker on another host lacks the files
            await self._workers("adapter_forget", key=ahead.load_id, adapter_id=adapter.adapter_id)
            logger.warning("loading %s from the store: %s", adapter.full_name, last_line(error))
            return False
        finally:
            await self._drop_received()
        return True

    async def _begin(self, key: str, path: str, *, is_3d: bool) -> None:
        await self._workers("adapter_read", key=key, path=path, is_3d=is_3d)

    async def _until_read(self, key: str, adapter_id: int) -> None:
        while not all(await self._workers("adapter_is_read", key=key, adapter_id=adapter_id)):
            await asyncio.sleep(READ_POLL_S)

    async def _check(self, adapter: Adapter) -> bool:
        attempts = 0

        async def check() -> None:
            nonlocal attempts
            attempts += 1
            await asyncio.to_thread(check_adapter, adapter, *await self._limits())

        try:
            await until_complete(check, self._lag_s)
        except (OSError, ValueError) as error:
            raise PayloadRejected(str(error)) from error
        return attempts == 1

    async def _limits(self) -> tuple[Schema | None, Any]:
        """The schema of the base model, if known on this host, and the engine's `LoRAConfig`."""
        if self._base is None:
            self._base = asyncio.create_task(asyncio.to_thread(self._read_base))
        base = self._base
        try:
            return await asyncio.shield(base), self._llm.vllm_config.lora_config
        except (OSError, ValueError):
            self._base = None  # retry for the next adapter
            raise

    def _read_base(self) -> Schema | None:
        config = self._llm.model_config
        directory = cached(config.model, config.revision, self._llm.vllm_config.load_config.download_dir)
        return complete_schema(directory, of_hub=directory != Path(config.model))


def last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
