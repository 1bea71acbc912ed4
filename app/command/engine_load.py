"""What each replica's engine is doing, from vLLM's metrics on the fleet's `/metrics`."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from app.client.connection import Call

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USE, TOKENS = "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Sums over the engines of a replica.

    Attributes:
        kv_use: of the fullest engine, 0 to 1.
        tokens: generated since it started.
        tokens_per_s: None: asked once only.
    """

    running: int
    waiting: int
    kv_use: float
    tokens: float
    tokens_per_s: float | None = None


def engine_loads() -> Call[dict[str, EngineLoad]]:
    """The load by replica id; a replica whose engine did not answer is missing."""
    return Call(method="GET", path="/metrics", read=lambda content, headers: read_loads(content.decode()))


def read_loads(text: str) -> dict[str, EngineLoad]:
    """Raises ValueError if the text is not in Prometheus' format."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("vllm:"):
            continue
        for sample in family.samples:
            if "replica" in sample.labels:
                found[sample.labels["replica"]][sample.name].append(sample.value)
    return {
        replica: EngineLoad(
            running=int(sum(values[RUNNING])),
            waiting=int(sum(values[WAITING])),
            kv_use=max(values[KV_USE], default=0.0),
            tokens=sum(values[TOKENS]),
        )
        for replica, values in found.items()
        if RUNNING in values
    }


def with_speed(
    before: Mapping[str, EngineLoad], now: Mapping[str, EngineLoad], period_s: float
) -> dict[str, EngineLoad]:
    """`now`, with tokens per second since `before`; without them for an engine that has started since."""
    made = dict(now)
    for replica in before.keys() & now.keys():
        tokens = now[replica].tokens - before[replica].tokens
        if tokens >= 0 and period_s > 0:
            made[replica] = replace(now[replica], tokens_per_s=tokens / period_s)
    return made
