"""What the composition root passes on, without a cluster."""

from pathlib import Path
from typing import Any

from ray.serve import Application, Deployment

from app.main import build
from app.settings.config import parse_config
from deployments.trainer.trainer import FLUSH_TIMEOUT_S
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


def test_serve_waits_for_a_stopping_trainer_until_it_has_written_its_last_version(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    router = build(parse_config({"model": str(model), "state_dir": str(tmp_path), "trainer": {}}))
    limit_s = deployment(router, "trainer")._deployment_config.graceful_shutdown_timeout_s
    assert limit_s > SERVE_WAITS_S + FLUSH_TIMEOUT_S + 1.0


def test_no_option_of_a_running_engine_depends_on_how_many_there_are(tmp_path: Path) -> None:
    """Serve restarts every replica whose actor options change."""
    one, four = (
        rollout(tmp_path, num_replicas=count, max_replicas=4)._replica_config.ray_actor_options
        for count in (1, 4)
    )
    assert one == four
    assert "OMP_NUM_THREADS" not in one["runtime_env"]["env_vars"]


def test_the_policy_decides_within_the_configured_bounds(tmp_path: Path) -> None:
    scaling = rollout(tmp_path, num_replicas=2, max_replicas=4)._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 4)
    assert scaling.policy.policy_kwargs["most"] == 4
    assert scaling.policy.get_policy().__name__ == "FleetScaling"


def test_a_fixed_fleet_has_no_policy(tmp_path: Path) -> None:
    config = rollout(tmp_path, num_replicas=3)._deployment_config
    assert (config.num_replicas, config.autoscaling_config) == (3, None)


def test_an_engine_asks_for_no_key_of_its_own_and_runs_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    made = rollout(tmp_path)
    environment = made._replica_config.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["VLLM_API_KEY"] == "", "the routers keep the tokens, and send none"
    (spec, *_) = made._replica_config.init_args
    assert spec.arguments["trust_remote_code"] is False
