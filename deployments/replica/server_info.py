"""`/server_info`: the engine's configuration as vLLM prints it, of the fleet as if it were one server.

Trainers read it before they begin: `weight_transfer_config`, `lora_config`, `model_config.dtype`. A
replica's own data parallelism is the fleet's affair, as are the replicas: one server with
`data_parallel_size` 1 is shown. So is the directory that a replica loaded: one that joined later took a
stored version, and shows the checkpoint that the fleet began with. `system_fingerprint`, which vLLM makes
of the same configuration, is therefore the same of every replica.

vLLM's answer also has the environment of its process. Ours has none of it, and no secret: no text under a
name that sounds like one, none in the free-form settings of connectors and loaders, no password in an
address, and nothing that an environment variable with such a name holds.
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
STAGED = "staged_"  # before the name of the engine of vLLM whose wire is staged: trainers look for that name
MIN_SECRET = 8  # characters; a shorter text, or a plain word, stands in too many other places
_SECRET = re.compile(
    r"(^|_)(token|keys?|secrets?|passw(or)?d|credentials?|auth|authorization|bearer|env_vars)($|_)", re.I
)
_FREE_FORM = re.compile(r"extra_config$|^additional_config$")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")

Format = Literal["text", "json"]
Tree = dict[str, Any]


def add_server_info(app: FastAPI, config: VllmConfig) -> None:
    """Add the route to a vLLM server's application, which has one in development mode only."""

    @app.get("/server_info")
    async def server_info(config_format: Annotated[Format, Query()] = "text") -> Tree:
        """The configuration of the fleet, as one vLLM server would print it."""
        return await asyncio.to_thread(describe, config, config_format, os.environ)


def describe(config: VllmConfig, config_format: Format, environment: Mapping[str, str]) -> Tree:
    """The answer of vLLM's route of this name, without the environment and without secrets."""
    shown = as_one_server(config)
    tree: Tree = PydanticVllmConfig.dump_python(shown, mode="json", fallback=str)
    named = [*_under_secret_names(tree), *_under_secret_names(dict(environment))]
    # The longest first: one may contain another.
    secrets = sorted({text for text in named if _is_told_apart(text)}, key=len, reverse=True)
    value = _hidden(tree if config_format == "json" else str(shown), secrets)
    return {"vllm_config": value, "vllm_env": {}, "system_env": {}}


def fleet_fingerprint(config: VllmConfig, args: Namespace) -> str | None:
    """`system_fingerprint` of every replica, in the mode that the server's arguments choose."""
    return build_system_fingerprint(as_one_server(config), args.fingerprint_mode, args.fingerprint_value)


def as_one_server(config: VllmConfig) -> VllmConfig:
    """A copy with one data-parallel rank and the fleet's checkpoint; nothing is derived anew from it."""
    shown, parallel, model = copy.copy(config), copy.copy(config.parallel_config), config.model_config
    checkpoint = config.additional_config["checkpoint"]
    if model.model != checkpoint:
        shown.model_config = copy.copy(model)
        shown.model_config.model = checkpoint
        if model.tokenizer == model.model:
            shown.model_config.tokenizer = checkpoint
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank = parallel.data_parallel_index = 0
    parallel.ray_runtime_env = parallel.placement_group = None  # where this replica runs, and its environment
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


def _is_told_apart(text: str) -> bool:
    return len(text) >= MIN_SECRET and (not text.isalpha() or len(text) >= 2 * MIN_SECRET)


def _hidden(value: Any, secrets: Sequence[str], name: str = "", *, free_form: bool = False) -> Any:
    """The same with `WITHHELD` for each secret."""
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
class Load:
    """Of all data-parallel ranks together."""

    running: int  # requests in the batch
    waiting: int  # requests without a place in it
    places: int  # that it has at most
    kv_use: float  # the fullest rank's share of KV cache blocks in use, 0 to 1


class LoadLogger(AggregateStatLoggerBase):
    """Keeps the newest numbers of each data-parallel rank."""

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
        """Nothing to print."""

    @property
    def load(self) -> Load:
        ranks = list(self._newest.values())
        return Load(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs + rank.num_skipped_waiting_reqs for rank in ranks),
            places=self._max_num_seqs * len(ranks),
            kv_use=max(rank.kv_cache_usage for rank in ranks),
        )


def watch_load(llm: AsyncLLM) -> LoadLogger:
    """Begin to keep what this engine's scheduler says. It says nothing if its statistics are switched off."""
    ranks = list(range(llm.vllm_config.parallel_config.data_parallel_size))
    if llm.logger_manager is None:
        return LoadLogger(llm.vllm_config, ranks)
    watching = LoadLogger(llm.vllm_config, llm.logger_manager.engine_indexes)
    llm.logger_manager.stat_loggers.append(watching)
    return watching
