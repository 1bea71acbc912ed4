"""Collects Prometheus metrics of all replicas, and of Ray's agent on all nodes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
import ray
from ray._private.services import get_webui_url_from_internal_kv
from ray.experimental import internal_kv

from deployments.host.network import host_port
from deployments.protocol.routing import KEY_HEADER, ReplicaEndpoint

PATH = "/metrics"
TIMEOUT_S = 3.0  # total; Prometheus gives up after ten


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """By replica id and by agent's address; None: no response in time."""

    replicas: Mapping[str, str | None] = field(default_factory=dict)
    nodes: Mapping[str, str | None] = field(default_factory=dict)


async def scrape(
    session: aiohttp.ClientSession,
    replicas: Mapping[str, ReplicaEndpoint],
    names: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
) -> Scraped:
    deadline = asyncio.get_running_loop().time() + timeout_s
    # vLLM filters names only at this path.
    path = f"{PATH}/?{urlencode([('name[]', name) for name in names])}" if names else PATH

    async def ask(address: str, key: str | None = None) -> str | None:
        headers = {} if key is None else {KEY_HEADER.decode(): key}
        try:
            async with (
                asyncio.timeout_at(deadline),
                session.get(f"http://{address}{path}", headers=headers) as answer,
            ):
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    async def ask_nodes() -> dict[str, str | None]:
        if names:
            return {}
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await asyncio.to_thread(_agents)
        except TimeoutError:
            return {}
        return dict(zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True))

    async def ask_replicas() -> dict[str, str | None]:
        answers = await asyncio.gather(*[ask(each.address, each.key) for each in replicas.values()])
        return dict(zip(replicas, answers, strict=True))

    of_replicas, of_nodes = await asyncio.gather(ask_replicas(), ask_nodes())
    return Scraped(replicas=of_replicas, nodes=of_nodes)


def _agents() -> list[str]:
    if not ray.is_initialized():
        return []
    nodes: list[dict[str, Any]] = ray.nodes()
    return [
        host_port(node["NodeManagerAddress"], node["MetricsExportPort"])
        for node in nodes
        if node["Alive"] and node["MetricsExportPort"] > 0
    ]


def dashboard() -> str | None:
    # A worker's `webui_url` always has the default port.
    if not internal_kv._internal_kv_initialized():
        return None
    address: str | None = get_webui_url_from_internal_kv()
    return address or None
