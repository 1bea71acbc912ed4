"""The metrics of a fleet, as Prometheus reads them."""

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scraped(client: httpx.Client) -> Mapping[str, Any]:
    """The metric families by name, each of which is there once."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def by_replica(family: Any, suffix: str = "", **labels: str) -> dict[str, float]:
    return {
        sample.labels["replica"]: sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    }
