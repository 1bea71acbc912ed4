"""Slots on a real cluster whose GPUs are resources in name only: how they are shared, and what survives."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.util.placement_group import get_placement_group

from deployments.serve.placement import SlotPlan, Slots, in_bundle, require_host_with, take_slot
from deployments.trainer.worker_group import resources
from tests.deployments.on_ray.slot_actors import Rank, Replica
from tests.deployments.trainer.trainer_specs import trainer_spec

pytestmark = [pytest.mark.serve, pytest.mark.fleet("ray"), pytest.mark.timeout(480)]
PLAN = SlotPlan(name="slots-test", slots=2, gpus_per_slot=2, engine_share=0.6, trainer_share=0.4)


@pytest.fixture(scope="module")
def replicas(serving: None) -> Iterator[Any]:
    options = {"ray_actor_options": {"num_cpus": 0}, "health_check_period_s": 1.0}
    slots = serve.deployment(Slots, name="slots", graceful_shutdown_timeout_s=30, **options).bind(PLAN)
    application = serve.deployment(Replica, name="replica", num_replicas=2, **options).bind(slots)
    yield serve.run(application, name="slots-test", route_prefix=None)
    serve.delete("slots-test")


def slots_of(replicas: Any, *, without: int = -1, timeout_s: float = 180.0) -> dict[int, tuple[str, int]]:
    """GPUs and process by slot, once two replicas are up, neither of which is the process `without`."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, tuple[str, int]] = {}
    while len(found) < 2:
        assert time.monotonic() < deadline, found
        try:
            index, visible, pid = replicas.slot.remote().result(timeout_s=10)
        except (ray.exceptions.RayError, TimeoutError):  # the replica died during the call
            continue
        if pid != without:
            found[index] = (visible, pid)
    return found


def start_ranks() -> list[Any]:
    group = get_placement_group(PLAN.name)
    options = {"num_cpus": 0, "num_gpus": PLAN.trainer_share}
    return [
        ray.remote(Rank).options(scheduling_strategy=in_bundle(group, rank), **options).remote()
        for rank in range(PLAN.gpus)
    ]


def test_a_trainer_rank_and_an_engine_rank_share_each_gpu_and_die_apart(replicas: Any) -> None:
    ranks = start_ranks()
    gpus, pids = zip(*ray.get([rank.gpu.remote() for rank in ranks], timeout=150), strict=True)
    assert sorted(gpus) == ["0", "1", "2", "3"]
    before = slots_of(replicas)
    assert sorted(before) == [0, 1]
    assert [before[index][0] for index in (0, 1)] == [f"{gpus[0]},{gpus[1]}", f"{gpus[2]},{gpus[3]}"]

    # A replica dies: the next one takes its GPUs, and the trainer's ranks are not affected.
    os.kill(before[1][1], signal.SIGKILL)
    after = slots_of(replicas, without=before[1][1])
    assert after[0] == before[0]
    assert after[1][0] == before[1][0] and after[1][1] != before[1][1]
    assert [pid for _, pid in ray.get([rank.gpu.remote() for rank in ranks], timeout=150)] == list(pids)

    for pid in pids:  # the trainer dies: its successor gets the same GPUs, the replicas are not affected
        os.kill(pid, signal.SIGKILL)
    successors = start_ranks()
    assert [gpu for gpu, _ in ray.get([rank.gpu.remote() for rank in successors], timeout=150)] == list(gpus)
    assert slots_of(replicas) == after


def test_the_trainers_workers_are_placed_by_their_rank(replicas: Any) -> None:
    spec = trainer_spec(transport="ipc", device="cuda")
    for rank in range(PLAN.gpus):
        options = resources(spec, rank, PLAN)
        strategy = options["scheduling_strategy"]
        assert strategy.placement_group.id == get_placement_group(PLAN.name).id
        assert (strategy.placement_group_bundle_index, options["num_gpus"]) == (rank, PLAN.trainer_share)
    assert resources(spec, 0, None)["num_gpus"] == 1.0, "a GPU of its own"


def test_slots_that_stay_taken_are_an_error_with_the_numbers(replicas: Any) -> None:
    slots_of(replicas)
    with pytest.raises(RuntimeError, match=r"all 2 slots of 2 GPUs stayed taken for 1 s"):
        asyncio.run(take_slot(PLAN, timeout_s=1.0))


def test_a_cluster_without_enough_gpus_on_one_host_is_an_error_with_the_numbers() -> None:
    require_host_with(4)
    with pytest.raises(RuntimeError, match=r"needs 5 GPUs on one host, but the largest .* has 4"):
        require_host_with(5)


def owner_of_slots() -> str | None:
    """The name of the actor that runs `Slots`; None while there is none."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return next((actor["name"] for actor in named if "#slots#" in actor["name"]), None)


def until_slots_answer(*, without: str | None, timeout_s: float = 60.0) -> None:
    """Wait until Serve has replaced the actor of this name, and the new one has the GPUs."""
    deadline = time.monotonic() + timeout_s
    slots = serve.get_deployment_handle("slots", "slots-test")
    while owner_of_slots() in (None, without):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert slots.plan.remote().result(timeout_s=timeout_s) == PLAN


def test_the_group_survives_its_owner_and_goes_with_the_application(replicas: Any) -> None:
    """The last one: it ends the application of the others."""
    before = slots_of(replicas)
    group = get_placement_group(PLAN.name)
    owner = owner_of_slots()
    ray.kill(ray.get_actor(owner, namespace="serve"), no_restart=True)
    until_slots_answer(without=owner)
    assert get_placement_group(PLAN.name).id == group.id
    assert slots_of(replicas) == before
    serve.delete("slots-test")
    with pytest.raises(ValueError, match="Failed to look up placement group"):
        get_placement_group(PLAN.name)
