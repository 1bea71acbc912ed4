"""The composed policy in Serve's own autoscaling state, after the way that a deployment's options take."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo

from deployments.serve.scaling import ScalingStats
from tests.app.test_main import rollout

DEPLOYMENT = DeploymentID(name="rollout", app_name="slipstream")
REPLICA = ReplicaID("r0", deployment_id=DEPLOYMENT)
Decide = Callable[..., int]


@pytest.fixture
def decide(tmp_path: Path) -> Decide:
    """The number that Serve works towards after a report; without one, what it does when it has none."""
    options = rollout(tmp_path, num_replicas=2, max_replicas=4)
    config = DeploymentConfig.from_proto_bytes(options._deployment_config.to_proto_bytes())
    state = DeploymentAutoscalingState(DEPLOYMENT)
    info = DeploymentInfo(
        deployment_config=config,
        replica_config=options._replica_config,
        start_time_ms=0,
        deployer_job_id="job",
        version="1",
    )
    assert state.register(info, -1) == 2, "what the fleet starts with"
    state.update_running_replica_ids([REPLICA])

    def after(target: int, report: ScalingStats | None = None) -> int:
        if report is not None:
            now = time.time()
            metrics = {name: [TimeStampedValue(now, value)] for name, value in asdict(report).items()}
            state.record_request_metrics_for_replica(
                ReplicaMetricReport(replica_id=REPLICA, timestamp=now, metrics=metrics)
            )
        return int(state.get_decision_num_replicas(target))

    return after


def operator_wants(wanted: int, number: int) -> ScalingStats:
    return ScalingStats(running=0, waiting=0, places=16, kv_use=0, wanted=wanted, wanted_number=number)


def test_the_operators_number_is_followed_at_once(decide: Decide) -> None:
    assert decide(2, operator_wants(4, 1)) == 4
    assert decide(4, operator_wants(1, 2)) == 1


def test_serve_keeps_its_number_while_nobody_reports(decide: Decide) -> None:
    assert decide(3) == 3


def test_the_load_is_looked_at_before_anything_changes(decide: Decide) -> None:
    busy = ScalingStats(running=16, waiting=30, places=16, kv_use=0.5, wanted_number=3)
    assert decide(1, busy) == 1
