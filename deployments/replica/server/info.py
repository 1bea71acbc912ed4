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
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from vllm.config import VllmConfig
from vllm.entrypoints.serve.dev.server_info.api_router import PydanticVllmConfig
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint

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
