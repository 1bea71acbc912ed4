from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.http.prometheus import exposition
from deployments.router.scrape import Scraped
from deployments.serve.instruments import ROUND
from tests.app.http.fake_status import report, status

REPLICAS = ("replica-0", "replica-1")
FLEET = status(3, REPLICAS)


def of_an_engine(tokens: int) -> str:
    """What a replica's process answers."""
    registry = CollectorRegistry()
    labels = {"model_name": "m", "engine": "0"}
    Counter("vllm:prompt_tokens", "prefilled", [*labels], registry=registry).labels(**labels).inc(tokens)
    Gauge("vllm:num_requests_running", "now", [*labels], registry=registry).labels(**labels).set(2)
    latency = Histogram("vllm:e2e_seconds", 'a "text"', [*labels], registry=registry, buckets=(0.5, 1.0))
    for seconds in (0.1, 0.7, 3.0):
        latency.labels(**labels).observe(seconds)
    return generate_latest(registry).decode()


def of_a_node(replica: str) -> str:
    rays = (
        f'Component="core_worker",NodeAddress="192.0.2.2",SessionName="session_1",WorkerId="{replica * 56}",'
        'otel_scope_name="ray",Version="2.60.0"'
    )
    return (
        "# HELP ray_serve_request_count_total requests\n# TYPE ray_serve_request_count_total counter\n"
        f'ray_serve_request_count_total{{deployment="router",replica="{replica}"}} 4.0\n'
        "# HELP ray_slipstream_router_requests_total requests\n"
        "# TYPE ray_slipstream_router_requests_total counter\n"
        f'ray_slipstream_router_requests_total{{{rays},outcome="answered"}} 3.0\n'
        "# HELP ray_slipstream_round_seconds rounds\n# TYPE ray_slipstream_round_seconds histogram\n"
        f'ray_slipstream_round_seconds_bucket{{{rays},le="+Inf"}} 1.0\n'
        f"ray_slipstream_round_seconds_count{{{rays}}} 1.0\nray_slipstream_round_seconds_sum{{{rays}}} 2.0\n"
        "# HELP ray_node_disk_usage disk\n# TYPE ray_node_disk_usage gauge\nray_node_disk_usage 1.0\n"
    )


def families(scraped: Scraped) -> Mapping[str, Any]:
    """By name; a name that comes twice would make two families."""
    text = exposition(FLEET, [report(1, 3)], scraped)
    found = list(text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def values(family: Any, *labels: str) -> dict[Any, float]:
    return {tuple(sample.labels[name] for name in labels): sample.value for sample in family.samples}


def test_metrics_of_all_replicas_are_one_family_with_a_label() -> None:
    found = families(Scraped(replicas={"replica-0": of_an_engine(5), "replica-1": of_an_engine(7)}))
    tokens = found["vllm:prompt_tokens"]
    assert tokens.type == "counter" and tokens.documentation == "prefilled"
    assert values(tokens, "replica", "model_name") == {("replica-0", "m"): 5.0, ("replica-1", "m"): 7.0}
    assert found["vllm:num_requests_running"].type == "gauge"
    assert values(found["slipstream_replica_metrics_up"], "replica") == {
        ("replica-0",): 1.0,
        ("replica-1",): 1.0,
    }


def test_histograms_are_intact() -> None:
    latency = families(Scraped(replicas={"replica-0": of_an_engine(5), "replica-1": of_an_engine(7)}))[
        "vllm:e2e_seconds"
    ]
    assert latency.type == "histogram" and latency.documentation == 'a "text"'
    for replica in REPLICAS:
        mine = [sample for sample in latency.samples if sample.labels["replica"] == replica]
        buckets = {sample.labels["le"]: sample.value for sample in mine if sample.name.endswith("_bucket")}
        assert buckets == {"0.5": 1.0, "1.0": 2.0, "+Inf": 3.0}
        (count,) = [sample.value for sample in mine if sample.name.endswith("_count")]
        (total,) = [sample.value for sample in mine if sample.name.endswith("_sum")]
        assert (count, round(total, 1)) == (3.0, 3.8)


def test_our_own_counts_are_named_without_ray_and_serves_are_left_out() -> None:
    nodes = {"n1": of_a_node("a"), "n2": of_a_node("b"), "n3": None}
    found = families(Scraped(nodes=nodes))
    own = found["slipstream_router_requests"]
    assert own.type == "counter" and own.documentation == "requests"
    assert [sample.labels for sample in own.samples] == [
        {"outcome": "answered", "process": "aaaaaaaaaaaa"},
        {"outcome": "answered", "process": "bbbbbbbbbbbb"},
    ]
    assert {sample.name for sample in found["slipstream_round_seconds"].samples} == set(ROUND.series)
    assert "ray_serve_request_count" not in found and "ray_node_disk_usage" not in found
    up = values(found["slipstream_node_metrics_up"], "node")
    assert up == {("n1",): 1.0, ("n2",): 1.0, ("n3",): 0.0}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "{not metrics",
        "# TYPE vllm:prompt_tokens_total gauge\nvllm:prompt_tokens_total 1\n" * 2 + "x y z",
    ],
)
def test_replica_that_does_not_answer_is_left_out_and_the_scrape_says_so(answer: str | None) -> None:
    found = families(Scraped(replicas={"replica-0": of_an_engine(5), "replica-1": answer}))
    assert values(found["vllm:prompt_tokens"], "replica") == {("replica-0",): 5.0}
    up = values(found["slipstream_replica_metrics_up"], "replica")
    assert up == {("replica-0",): 1.0, ("replica-1",): 0.0}


def test_types_that_do_not_agree_leave_the_second_out() -> None:
    other = of_an_engine(5).replace("vllm:num_requests_running gauge", "vllm:num_requests_running counter")
    found = families(Scraped(replicas={"replica-0": of_an_engine(5), "replica-1": other}))
    assert values(found["slipstream_replica_metrics_up"], "replica")["replica-1",] == 0.0
    assert found["vllm:num_requests_running"].type == "gauge"


def test_unreachable_member_is_down_and_unknown_replica_is_shown() -> None:
    found = families(Scraped(replicas={"replica-9": of_an_engine(1)}))
    up = values(found["slipstream_replica_metrics_up"], "replica")
    assert up == {("replica-0",): 0.0, ("replica-1",): 0.0, ("replica-9",): 1.0}
