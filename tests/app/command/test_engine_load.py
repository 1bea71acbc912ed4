from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from app.command.engine_load import EngineLoad, read_loads, with_speed


def two_engines_of_a_replica() -> str:
    registry = CollectorRegistry()
    labels = ("replica", "engine")
    running = Gauge("vllm:num_requests_running", "", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "", labels, registry=registry)
    kv_use = Gauge("vllm:kv_cache_usage_perc", "", labels, registry=registry)
    tokens = Counter("vllm:generation_tokens", "", labels, registry=registry)
    for engine, (now, queued, use, made) in enumerate([(3, 1, 0.5, 100), (4, 0, 0.25, 50)]):
        running.labels("r0", engine).set(now)
        waiting.labels("r0", engine).set(queued)
        kv_use.labels("r0", engine).set(use)
        tokens.labels("r0", engine).inc(made)
    return generate_latest(registry).decode()


def test_the_engines_of_a_replica_are_added_up() -> None:
    assert read_loads(two_engines_of_a_replica()) == {
        "r0": EngineLoad(running=7, waiting=1, kv_use=0.5, tokens=150.0)
    }


def test_speed_needs_two_answers_of_the_same_engine() -> None:
    def load(tokens: float) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, kv_use=0.0, tokens=tokens)

    made = with_speed(
        {"r0": load(100), "r1": load(900)}, {"r0": load(150), "r1": load(3), "r2": load(5)}, 2.0
    )
    assert {name: each.tokens_per_s for name, each in made.items()} == {"r0": 25.0, "r1": None, "r2": None}
