"""What Serve makes of a changed configuration file: compared with its own code, without a cluster."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from app.command.deploy import read_serve_file
from app.main import build
from app.settings.config import parse_config
from tests.tiny_models import save_tiny_llama


def schema(directory: Path, *deployments: dict[str, Any], **settings: Any) -> ServeApplicationSchema:
    args = {"model": str(directory / "model"), "state_dir": str(directory), **settings}
    application = {"name": "slipstream", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    application["deployments"] = [*deployments]
    path = directory / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return ServeDeploySchema.model_validate(read_serve_file(path).document).applications[0]


def versions(made: ServeApplicationSchema) -> dict[str, DeploymentVersion]:
    """Of each deployment, as Serve compares them with those that run."""
    router = build(parse_config(made.args))._bound_deployment
    bound = [each._bound_deployment for each in router.init_args if isinstance(each, Application)]
    infos = {
        each.name: DeploymentInfo(
            deployment_config=each._deployment_config,
            replica_config=each._replica_config,
            start_time_ms=0,
            deployer_job_id="job",
            version=get_app_code_version(made),
        )
        for each in (router, *bound)
    }
    return {
        name: DeploymentVersion(info.version, info.deployment_config, info.replica_config.ray_actor_options)
        for name, info in override_deployment_info(infos, made).items()
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path / "model", seed=0)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reconfigured"),
    [
        ({"weights": {"commit": "rolling", "drain_timeout_s": 30}}, {"controller"}),
        ({"router": {"max_ongoing_requests": 3}}, {"router"}),
        ({"router": {"num_replicas": 2}}, set()),
    ],
)
def test_live_settings_restart_nothing(
    directory: Path, settings: dict[str, Any], reconfigured: set[str]
) -> None:
    before, after = versions(schema(directory)), versions(schema(directory, **settings))
    assert not [name for name in after if before[name].requires_actor_restart(after[name])]
    assert {name for name in after if before[name].requires_actor_reconfigure(after[name])} == reconfigured


@pytest.mark.slow
def test_any_other_setting_restarts_the_fleet(directory: Path) -> None:
    before, after = versions(schema(directory)), versions(schema(directory, engine={"max_num_seqs": 1}))
    assert all(before[name].requires_actor_restart(after[name]) for name in after)


@pytest.mark.slow
def test_options_of_the_replicas_process_restart_the_replicas_alone_and_keep_the_other_options(
    directory: Path,
) -> None:
    """Serve takes them in place of the application's own."""
    own = {"num_cpus": 1, "runtime_env": {"env_vars": {"PYTHONPATH": "/opt/vllm"}}}
    before = versions(schema(directory))
    after = versions(schema(directory, {"name": "rollout", "ray_actor_options": own}))
    assert [name for name in after if before[name].requires_actor_restart(after[name])] == ["rollout"]
    options, kept = after["rollout"].ray_actor_options, before["rollout"].ray_actor_options
    variables = {**kept["runtime_env"]["env_vars"], "PYTHONPATH": "/opt/vllm"}
    assert options == {
        **kept,
        "num_cpus": 1,
        "runtime_env": {**kept["runtime_env"], "env_vars": variables},
    }
    own["runtime_env"]["py_executable"] = "/opt/vllm/bin/python"
    other = versions(schema(directory, {"name": "rollout", "ray_actor_options": own}))
    assert other["rollout"].ray_actor_options["runtime_env"]["py_executable"] == "/opt/vllm/bin/python"
