"""What the composition root passes on, without a cluster."""

from pathlib import Path

from ray.serve import Application

from app.main import build
from app.settings.config import parse_config
from deployments.trainer.trainer import FLUSH_TIMEOUT_S
from tests.tiny_models import save_tiny_llama

SERVE_WAITS_S = 2.0  # for calls, before it lets a replica end (graceful_shutdown_wait_loop_s)


def test_serve_waits_for_a_stopping_trainer_until_it_has_written_its_last_version(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    router = build(parse_config({"model": str(model), "state_dir": str(tmp_path), "trainer": {}}))
    arguments = router._bound_deployment.init_args
    (trainer,) = [
        each._bound_deployment
        for each in arguments
        if isinstance(each, Application) and each._bound_deployment.name == "trainer"
    ]
    limit_s = trainer._deployment_config.graceful_shutdown_timeout_s
    assert limit_s > SERVE_WAITS_S + FLUSH_TIMEOUT_S + 1.0
