"""`/metrics` of a real fleet: vLLM's of both replicas, Serve's, and counters that only grow."""

import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.session_fleet import Fleet
from tests.fleet.talk import on_every_replica, train_and_publish

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

SERVE_REPORTS_S = 40.0  # Ray's processes report to the agent every ten seconds


def scraped(client: httpx.Client) -> Mapping[str, Any]:
    """The metric families by name, each of which is there once."""
    began = time.monotonic()
    answer = client.get("/metrics")
    assert time.monotonic() - began < 10, "Prometheus would have given up"
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


def test_vllms_metrics_of_every_replica(fleet: Fleet) -> None:
    with fleet.client() as client:
        replicas = set(on_every_replica(client, max_tokens=4))
        before = by_replica(scraped(client)["vllm:prompt_tokens"], "_total")
        assert set(on_every_replica(client, max_tokens=4)) == replicas
        found = scraped(client)
    tokens = found["vllm:prompt_tokens"]
    assert tokens.type == "counter"
    after = by_replica(tokens, "_total")
    assert set(after) == replicas and all(after[name] > before[name] for name in replicas)
    assert by_replica(found["slipstream_replica_metrics_up"]) == dict.fromkeys(replicas, 1.0)
    assert found["vllm:num_requests_running"].type == "gauge"
    latency = found["vllm:e2e_request_latency_seconds"]
    assert latency.type == "histogram"
    counts = by_replica(latency, "_count")
    assert set(counts) == replicas and counts == by_replica(latency, "_bucket", le="+Inf")
    for name in replicas:
        mine = [each for each in latency.samples if each.labels["replica"] == name]
        buckets = [each.value for each in mine if each.name.endswith("_bucket")]
        assert buckets == sorted(buckets), "cumulative, in their order"


def test_serves_metrics_of_all_its_replicas(fleet: Fleet) -> None:
    deadline = time.monotonic() + SERVE_REPORTS_S
    with fleet.client() as client:
        while True:
            found = scraped(client)
            serves = {name: each for name, each in found.items() if name.startswith("ray_serve_")}
            deployments = {
                sample.labels["deployment"]
                for family in serves.values()
                for sample in family.samples
                if sample.labels.get("replica")
            }
            if {"router", "rollout", "controller"} <= deployments:
                break
            assert time.monotonic() < deadline, f"Serve's metrics are of {deployments}: {sorted(serves)}"
            time.sleep(2)
        assert all(sample.value == 1.0 for sample in found["slipstream_node_metrics_up"].samples)
    assert not any(name.startswith("ray_") and name not in serves for name in found)


def test_rounds_are_counted(fleet: Fleet) -> None:
    def rounds(client: httpx.Client) -> dict[str, float]:
        family = scraped(client)["slipstream_rounds"]
        assert family.type == "counter"
        return {sample.labels["outcome"]: sample.value for sample in family.samples}

    with fleet.client() as client:
        before = rounds(client)
        train_and_publish(client)
        assert rounds(client) == {**before, "committed": before["committed"] + 1}
