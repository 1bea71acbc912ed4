"""`/server_info` as vLLM prints it, as if the fleet were one server.

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
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from vllm.config import VllmConfig
from vllm.entrypoints.serve.dev.server_info.api_router import PydanticVllmConfig
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint

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
