"""Checks an adapter's files, the fleet's copy, and has the workers read them while the engine decodes."""

import asyncio
from pathlib import Path
from typing import Any

from deployments.protocol.adapters import Adapter
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapters.check import check_adapter
from deployments.replica.worker_calls import Workers
from deployments.weights.store.adapter_store import LAG_S, until_complete
from deployments.weights.store.hub import cached, complete_schema
from deployments.weights.wire.checkpoint_schema import Schema

READ_POLL_S = 0.01


class AdapterReader:
    """Has the workers read adapters; waits up to `lag_s` for files that differ from the fleet's copy."""

    def __init__(self, llm: Any, calls: Workers, lag_s: float = LAG_S) -> None:
        self._llm = llm
        self._calls = calls
        self._lag_s = lag_s
        self._base: asyncio.Task[Schema | None] | None = None

    async def read(self, adapter: Adapter) -> None:
        """Check an adapter and have the workers read it. Raises PayloadRejected."""
        await self._begin(adapter)
        if not await self._check(adapter):
            await self._begin(adapter)  # the workers may have read the files before they were complete
        while not all(await self._calls("adapter_is_read", adapter_id=adapter.adapter_id)):
            await asyncio.sleep(READ_POLL_S)

    async def forget(self, adapter: Adapter) -> None:
        await self._calls("adapter_forget", adapter_id=adapter.adapter_id)

    async def _begin(self, adapter: Adapter) -> None:
        await self._calls(
            "adapter_read", adapter_id=adapter.adapter_id, path=adapter.path, is_3d=adapter.is_3d
        )

    async def _check(self, adapter: Adapter) -> bool:
        """Whether the first attempt found complete files."""
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
