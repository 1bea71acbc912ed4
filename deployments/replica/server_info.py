"""`/server_info` as vLLM prints it, as if the fleet were one server; and the engine's load.

`data_parallel_size` is 1, and the model is the initial checkpoint, even for late joiners, so all replicas
have the same `system_fingerprint`. Withheld: the environment, values under names that look secret, free-form
settings of connectors and loaders, passwords in URLs.
"""

import asyncio
import copy
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from vllm.config import VllmConfig
from vllm.entrypoints.serve.dev.server_info.api_router import PydanticVllmConfig
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

WITHHELD = "***"
STAGED = "staged_"  # prefix of backends that stage vLLM's own wire; trainers look for vLLM's name
MIN_SECRET = 8  # characters; shorter texts and plain words occur elsewhere
_SECRET = re.compile(
    r"(^|_)(token|keys?|secrets?|passw(or)?d|credentials?|auth|authorization|bearer|env_vars)($|_)", re.I
)
_FREE_FORM = re.compile(r"extra_config$|^additional_config$")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")

Format = Literal["text", "json"]
Tree = dict[str, Any]


def add_server_info(app: FastAPI, config: VllmConfig) -> None:
    """vLLM has this route in development mode only."""

    @app.get("/server_info")
    async def server_info(config_format: Annotated[Format, Query()] = "text") -> Tree:
        return await asyncio.to_thread(describe, config, config_format, os.environ)


def describe(config: VllmConfig, config_format: Format, environment: Mapping[str, str]) -> Tree:
    shown = as_one_server(config)
    tree: Tree = PydanticVllmConfig.dump_python(shown, mode="json", fallback=str)
    named = [*_under_secret_names(tree), *_under_secret_names(dict(environment))]
    # Longest first: one may contain another.
    secrets = sorted({text for text in named if _is_distinctive(text)}, key=len, reverse=True)
    value = _hidden(tree if config_format == "json" else str(shown), secrets)
    return {"vllm_config": value, "vllm_env": {}, "system_env": {}}


def fleet_fingerprint(config: VllmConfig, args: Namespace) -> str | None:
    return build_system_fingerprint(as_one_server(config), args.fingerprint_mode, args.fingerprint_value)


def as_one_server(config: VllmConfig) -> VllmConfig:
    shown, parallel, model = copy.copy(config), copy.copy(config.parallel_config), config.model_config
    checkpoint = config.additional_config["checkpoint"]
    if model.model != checkpoint:
        shown.model_config = copy.copy(model)
        shown.model_config.model = checkpoint
        if model.tokenizer == model.model:
            shown.model_config.tokenizer = checkpoint
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank = parallel.data_parallel_index = 0
    parallel.ray_runtime_env = parallel.placement_group = None
    shown.parallel_config = parallel
    transfer = config.weight_transfer_config
    if transfer is not None and transfer.backend.startswith(STAGED):
        shown.weight_transfer_config = copy.copy(transfer)
        shown.weight_transfer_config.backend = transfer.backend.removeprefix(STAGED)
    return shown


def _under_secret_names(tree: Any, name: str = "") -> Iterable[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _under_secret_names(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _under_secret_names(value, name)
    elif isinstance(tree, str) and _SECRET.search(name):
        yield tree


def _is_distinctive(text: str) -> bool:
    return len(text) >= MIN_SECRET and (not text.isalpha() or len(text) >= 2 * MIN_SECRET)


def _hidden(value: Any, secrets: Sequence[str], name: str = "", *, free_form: bool = False) -> Any:
    free_form = free_form or _FREE_FORM.search(name) is not None
    if isinstance(value, dict):
        return {key: _hidden(each, secrets, key, free_form=free_form) for key, each in value.items()}
    if isinstance(value, list):
        return [_hidden(each, secrets, name, free_form=free_form) for each in value]
    if not isinstance(value, str):
        return value
    if value and (free_form or _SECRET.search(name)):
        return WITHHELD
    for secret in secrets:
        value = value.replace(secret, WITHHELD)
    return _IN_ADDRESS.sub(WITHHELD, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int
    waiting: int
    places: int  # sum of `max_num_seqs` over all ranks
    kv_use: float  # share of KV cache blocks in use of the fullest rank, 0 to 1


class LoadLogger(AggregateStatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._newest = {index: SchedulerStats() for index in engine_indexes}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._newest[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        pass

    @property
    def load(self) -> EngineLoad:
        ranks = list(self._newest.values())
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs + rank.num_skipped_waiting_reqs for rank in ranks),
            places=self._max_num_seqs * len(ranks),
            kv_use=max(rank.kv_cache_usage for rank in ranks),
        )


def watch_load(llm: AsyncLLM) -> LoadLogger:
    """All zero if statistics are disabled."""
    ranks = list(range(llm.vllm_config.parallel_config.data_parallel_size))
    if llm.logger_manager is None:
        return LoadLogger(llm.vllm_config, ranks)
    watching = LoadLogger(llm.vllm_config, llm.logger_manager.engine_indexes)
    llm.logger_manager.stat_loggers.append(watching)
    return watching
