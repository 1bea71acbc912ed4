"""What the composition root passes on, without a cluster."""

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application, Deployment

from app.main import (
    IN_ENGINE_PROCESS,
    THREADS_BIND,
    build,
    check_proxy,
    executor,
    require_hosts,
    staging,
    trainer_spec,
)
from app.settings.config import parse_config
from app.settings.section import ConfigError
from deployments.host.fork_server.client import is_read_at_import
from deployments.router.request_inspection import MAX_SEQUENCES
from deployments.serve.placement import FREE_TIMEOUT_S
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import FLUSH_TIMEOUT_S
from deployments.trainer.worker_group import resources
from deployments.weights.transports.registry import KeepPublished
from tests.app.settings.complaints import COLOCATED, SEPARATE
from tests.tiny_models import save_tiny_llama

SERVE_WAITS_S = 2.0  # for calls, before it lets a replica end (graceful_shutdown_wait_loop_s)


def deployment(router: Application, name: str) -> Deployment:
    (found,) = [
        each._bound_deployment
        for each in router._bound_deployment.init_args
        if isinstance(each, Application) and each._bound_deployment.name == name
    ]
    return found


def rollout(tmp_path: Path, **engine: Any) -> Deployment:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    return deployment(
        build(parse_config({"model": str(model), "state_dir": str(tmp_path), "engine": engine})), "rollout"
    )


@pytest.mark.slow
def test_serve_waits_for_a_stopping_trainer_until_it_has_written_its_last_version(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    router = build(parse_config({"model": str(model), "state_dir": str(tmp_path), "trainer": {}}))
    limit_s = deployment(router, "trainer")._deployment_config.graceful_shutdown_timeout_s
    assert limit_s > SERVE_WAITS_S + FLUSH_TIMEOUT_S + 1.0
    assert limit_s < FREE_TIMEOUT_S, "colocated, it is killed with the placement group"


@pytest.mark.slow
def test_no_option_of_a_running_engine_depends_on_how_many_there_are(tmp_path: Path) -> None:
    """Serve restarts every replica whose actor options change."""
    one, four = (
        rollout(tmp_path, num_replicas=count, max_replicas=4)._replica_config.ray_actor_options
        for count in (1, 4)
    )
    assert one == four
    assert "OMP_NUM_THREADS" not in one["runtime_env"]["env_vars"]


def test_a_fixed_fleet_has_no_policy(tmp_path: Path) -> None:
    config = rollout(tmp_path, num_replicas=3)._deployment_config
    assert (config.num_replicas, config.autoscaling_config) == (3, None)


def test_an_engine_asks_for_no_key_of_its_own_and_runs_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    made = rollout(tmp_path)
    environment = made._replica_config.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["VLLM_API_KEY"] == "", "the routers keep the tokens, and send none"
    (spec, *_) = made._replica_config.init_args
    assert spec.arguments["trust_remote_code"] is False


def test_an_address_that_haproxy_does_not_serve_is_refused() -> None:
    on = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    with pytest.raises(ConfigError, match=r"'http_options.host': expected an IPv4 address.* got '::1'"):
        check_proxy("::1", on)
    for host, environment in (("::1", {}), ("127.0.0.1", on), (None, on)):
        check_proxy(host, environment)


def test_shared_memory_does_not_connect_several_hosts(tmp_path: Path) -> None:
    config = parse_config({"model": str(tmp_path), "state_dir": str(tmp_path)})
    require_hosts(config, str(tmp_path), 1)
    with pytest.raises(ConfigError, match="expected 'gloo' in a cluster of 2 hosts, got 'shm'"):
        require_hosts(config, str(tmp_path), 2)


@pytest.mark.slow
def test_a_fleet_whose_hosts_share_no_store_says_so_to_all_who_use_one(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    for shared, kept in ((True, None), (False, 3)):
        settings = {"model": str(model), "state_dir": str(tmp_path), "trainer": {}}
        router = build(parse_config({**settings, "store": {"shared": shared}}))
        assert deployment(router, "rollout").init_kwargs["store"] == (str(tmp_path / "store"), kept)
        assert deployment(router, "controller").init_kwargs["config"].shared_store is shared
        assert deployment(router, "trainer").init_args[0].store_keep == kept


def test_whether_a_list_of_prompts_is_taken_does_not_depend_on_how_it_is_divided(tmp_path: Path) -> None:
    environment = rollout(tmp_path)._replica_config.ray_actor_options["runtime_env"]["env_vars"]
    assert int(environment["VLLM_MAX_COMPLETION_PROMPTS"]) >= MAX_SEQUENCES


def test_a_trainers_ranks_are_forks_of_the_replicas_server(tmp_path: Path) -> None:
    """A second one costs 17 s of imports at each start."""
    replica = rollout(tmp_path)._replica_config.ray_actor_options
    config = parse_config({"model": "m", "device": "cuda", "weights": {"transport": "ipc"}, "trainer": {}})
    rank = resources(trainer_spec(config, config.trainer, "m"), 0, None)
    of_replica, of_rank = (
        {name: value for name, value in each["runtime_env"]["env_vars"].items() if is_read_at_import(name)}
        for each in (replica, rank)
    )
    assert of_replica == of_rank


@pytest.mark.parametrize(
    ("device", "engine", "chosen"),
    [
        ("cpu", {}, IN_ENGINE_PROCESS),
        ("cpu", {"env": {THREADS_BIND: "0-1"}}, None),  # threads that are bound need a process of their own
        ("cpu", {"tensor_parallel_size": 2}, "mp"),
        ("cuda", {}, None),
    ],
)
def test_the_executor_follows_device_and_ranks(
    device: str, engine: dict[str, Any], chosen: str | None
) -> None:
    transport = {"cpu": "shm", "cuda": "ipc"}[device]
    document = {"model": "m", "device": device, "engine": engine, "weights": {"transport": transport}}
    assert executor(parse_config(document)).get("distributed_executor_backend") == chosen


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "automatic"),
        ({"engine": {"extra": {"enable_lora": True}}}, "host"),
        ({"device": "cuda", "weights": {"transport": "nccl"}}, "host"),
        ({"weights": {"staging": "host"}}, "host"),
        ({"weights": {"staging": "device"}}, "device"),
        (COLOCATED, "device"),
        (SEPARATE | {"weights": {"transport": "nccl", "staging": "none"}}, "none"),
    ],
)
def test_the_staging_is_the_configured_one_or_that_of_the_device(
    settings: dict[str, Any], expected: str
) -> None:
    assert staging(parse_config({"model": "m", **settings})) == expected


def test_a_trainers_spec_comes_from_all_sections() -> None:
    store = {"path": "v", "keep": 5}
    config = parse_config(
        {"model": "m", **SEPARATE, "state_dir": "/s", "store": store, "trust_remote_code": True}
    )
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "/models/m") == TrainerSpec(
        config=config.trainer,
        model="/models/m",
        device="cuda",
        store_dir="/s/v",
        transport="nccl",
        chunk_bytes=512 << 20,
        native=False,
        trust_remote_code=True,
    )


def test_without_staging_the_trainer_sends_with_vllms_own_engine() -> None:
    weights = {"transport": "nccl", "staging": "none", "chunk_bytes": 1 << 20}
    config = parse_config({"model": "m", **SEPARATE, "weights": weights})
    assert config.trainer is not None
    spec = trainer_spec(config, config.trainer, "/models/m")
    assert (spec.native, spec.chunk_bytes, spec.keep_published) == (True, 1 << 20, None)


def test_the_trainer_keeps_what_it_published_where_that_is_configured() -> None:
    weights = {"transport": "nccl", "staging": "device", "keep_published": "host"}
    config = parse_config({"model": "m", **SEPARATE, "weights": weights})
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "/models/m").keep_published is KeepPublished.HOST


def test_the_trainer_begins_with_the_revision_that_the_replicas_load() -> None:
    config = parse_config({"model": "org/m", **SEPARATE, "engine": {"extra": {"revision": "v2"}}})
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "org/m").revision == "v2"
