"""Slots: a replica's GPUs, shared with trainer ranks (`placement: colocated`).

    Slots (a Serve deployment)   owns a placement group with one bundle per GPU
    trainer rank r               an actor in bundle r, with the trainer's share of that GPU
    replica                      takes a free slot i: the bundles [i * R, (i + 1) * R) of R GPUs

Serve cannot place a replica in an existing placement group, and a replica's own group would end the trainer's
actors with it. So a replica reserves nothing and starts a `GpuHolder` in each bundle of its slot: an actor
with the engine's share, which reports the GPU's id. The first holder's name locks the slot. Ray frees the
slot when the replica's process exits.

CUDA IPC between trainer ranks and replicas needs one host.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GROUP_TIMEOUT_S = 60.0  # the previous holder may still be stopping
TAKE_TIMEOUT_S = 180.0
FREE_TIMEOUT_S = 320.0  # longer than a trainer's `STOP_TIMEOUT_S`: it writes its last version
_POLL_S = 0.5
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    name: str
    slots: int
    gpus_per_slot: int
    engine_share: float
    trainer_share: float

    @property
    def gpus(self) -> int:
        return self.slots * self.gpus_per_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    index: int
    gpus: tuple[str, ...]  # as in CUDA_VISIBLE_DEVICES, in the order of the engine's workers
    holders: tuple[Any, ...]  # handles of the `GpuHolder` actors; dropping them frees the GPUs


class GpuHolder:
    def location(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        (gpu,) = context.get_accelerator_ids()["GPU"]
        return context.get_node_id(), gpu


class Slots:
    """A restarted process finds the placement group by name; it is removed with the application. Raises
    RuntimeError if no host has enough GPUs."""

    async def __init__(self, plan: SlotPlan) -> None:  # type: ignore[misc]  # Serve awaits it
        self._plan = plan
        require_host_with(plan.gpus)
        group = await _existing_group(plan)
        if group is None:
            bundles = [{"GPU": 1.0}] * plan.gpus
            group = placement_group(bundles, strategy="STRICT_PACK", name=plan.name, lifetime="detached")
        if not await asyncio.to_thread(group.wait, GROUP_TIMEOUT_S):
            remove_placement_group(group)
            free = ray.available_resources().get("GPU", 0.0)
            raise RuntimeError(
                f"placement 'colocated' needs {plan.gpus} whole GPUs of one host, which did not become free "
                f"within {GROUP_TIMEOUT_S:g} s; free in the cluster: {free:g}"
            )
        self._group: PlacementGroup | None = group

    async def plan(self) -> SlotPlan:
        return self._plan

    async def __del__(self) -> None:
        group: PlacementGroup | None = getattr(self, "_group", None)
        if group is not None:
            self._group = None
            await _until_free(group)  # removing the group kills the actors in it
            remove_placement_group(group)


async def take_slot(plan: SlotPlan, timeout_s: float = TAKE_TIMEOUT_S) -> Slot:
    """Raises RuntimeError or TimeoutError."""
    group = get_placement_group(plan.name)
    deadline = time.monotonic() + timeout_s
    while True:
        for index in range(plan.slots):
            holders = _start_holders(plan, group, index)
            if holders is not None:
                return await _located(index, holders, timeout_s)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"all {plan.slots} slots of {plan.gpus_per_slot} GPUs stayed taken for {timeout_s:g} s"
            )
        await asyncio.sleep(_POLL_S)


def use_gpus(slot: Slot) -> None:
    os.environ[VISIBLE_DEVICES] = ",".join(slot.gpus)


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def require_host_with(gpus: int) -> None:
    largest = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    if largest < gpus:
        raise RuntimeError(
            f"placement 'colocated' needs {gpus} GPUs on one host, but the largest of the Ray cluster "
            f"has {largest:g}"
        )


def _start_holders(plan: SlotPlan, group: PlacementGroup, index: int) -> list[Any] | None:
    first_bundle = index * plan.gpus_per_slot
    holders = []
    for worker in range(plan.gpus_per_slot):
        holder = ray.remote(GpuHolder).options(
            name=f"{plan.name}-slot-{index}" if worker == 0 else None,
            num_cpus=0,
            num_gpus=plan.engine_share,
            scheduling_strategy=in_bundle(group, first_bundle + worker),
            max_restarts=-1,  # a killed holder must not free its GPU under the engine
        )
        try:
            holders.append(holder.remote())
        except ValueError:
            return None
    return holders


async def _located(index: int, holders: list[Any], timeout_s: float) -> Slot:
    locations = await asyncio.wait_for(
        asyncio.gather(*[holder.location.remote() for holder in holders]), timeout_s
    )
    host = ray.get_runtime_context().get_node_id()
    other_hosts = {node for node, _ in locations} - {host}
    if other_hosts:
        raise RuntimeError(
            f"the GPUs of slot {index} are on host {other_hosts.pop()}, but Serve has placed this replica on "
            f"{host}: placement 'colocated' needs a cluster of one host; use 'separate' on several"
        )
    return Slot(index=index, gpus=tuple(gpu for _, gpu in locations), holders=tuple(holders))


async def _existing_group(plan: SlotPlan) -> PlacementGroup | None:
    """A group of another size is being replaced: removed after the timeout."""
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    while True:
        try:
            group = get_placement_group(plan.name)
        except ValueError:
            return None
        if group.bundle_count == plan.gpus:
            return group
        if time.monotonic() > deadline:
            remove_placement_group(group)
        await asyncio.sleep(_POLL_S)


async def _until_free(group: PlacementGroup) -> None:
    name = f"GPU_group_{group.id.hex()}"
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while time.monotonic() < deadline:
        if ray.available_resources().get(name, 0.0) >= group.bundle_count:
            return
        await asyncio.sleep(_POLL_S)
