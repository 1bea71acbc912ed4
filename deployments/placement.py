"""Slots: the GPUs of each replica, and of the trainer ranks that share them (`placement: colocated`).

    Slots (a Serve deployment)   makes a placement group, one bundle for each GPU, and removes it at the end
    trainer rank r               an actor in bundle r, with its share of that GPU
    replica                      takes a free slot i, which is the bundles [i * R, (i + 1) * R)

Serve cannot place a replica in a placement group that exists, and one that Serve makes dies with its
replica and takes the trainer along. So the replica itself reserves nothing. It starts one *keeper* in each
bundle of its slot, an actor that holds the engine's share and knows the GPU's number; the first keeper's
name makes sure that nobody else takes the slot. The keepers belong to the replica's process: when it ends,
however it ends, Ray frees the slot for the next one. The trainer's ranks do not notice, and the other way
round.

Everything is on one host: trainer ranks reach their replica by CUDA IPC, and an engine's processes
are started where its replica is. Larger fleets are `placement: separate`, with transport `nccl`.
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

GROUP_TIMEOUT_S = 60.0  # whoever had the GPUs before may still be stopping
TAKE_TIMEOUT_S = 180.0
FREE_TIMEOUT_S = 40.0  # a trainer that stops writes its last version
_POLL_S = 0.5
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Attributes:
    name: of the placement group, in Serve's namespace; one for each fleet.
    slots: as many as replicas.
    gpus_per_slot: workers of one engine.
    engine_share, trainer_share: of each GPU; at most 1 together.
    """

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
    """Attributes:
    index: of the slot.
    gpus: their numbers as CUDA_VISIBLE_DEVICES wants them, in the order of the engine's workers.
    keepers: hold the GPUs as long as this process lives.
    """

    index: int
    gpus: tuple[str, ...]
    keepers: tuple[Any, ...]


class Keeper:
    """An actor that holds a share of a bundle's GPU."""

    def where(self) -> tuple[str, str]:
        """The host (Ray's node id) and the GPU's number there."""
        context = ray.get_runtime_context()
        (gpu,) = context.get_accelerator_ids()["GPU"]
        return context.get_node_id(), gpu


class Slots:
    """Serve's deployment class that owns the GPUs of a colocated fleet.

    The group outlives this process: a restarted one finds it by its name, and nobody else notices. It is
    removed when the application is.

    Raises:
        RuntimeError: no host of the cluster has GPUs enough, or others hold them.
    """

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
        """Answered once the GPUs are reserved."""
        return self._plan

    async def __del__(self) -> None:
        group: PlacementGroup | None = getattr(self, "_group", None)
        if group is not None:
            self._group = None
            await _until_free(group)  # removing it ends the actors in it
            remove_placement_group(group)


async def take_slot(plan: SlotPlan, timeout_s: float = TAKE_TIMEOUT_S) -> Slot:
    """Take a slot that no other replica has, for as long as this process lives.

    Raises:
        RuntimeError: all slots stayed taken, or they are on another host.
    """
    group = get_placement_group(plan.name)
    deadline = time.monotonic() + timeout_s
    while True:
        for index in range(plan.slots):
            keepers = _start_keepers(plan, group, index)
            if keepers is not None:
                return await _kept(plan, index, keepers, timeout_s)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"all {plan.slots} slots of {plan.gpus_per_slot} GPUs stayed taken for {timeout_s:g} s"
            )
        await asyncio.sleep(_POLL_S)


def use_gpus(slot: Slot) -> None:
    """Show this process and those that it starts the slot's GPUs only; before CUDA is touched."""
    os.environ[VISIBLE] = ",".join(slot.gpus)


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def require_host_with(gpus: int) -> None:
    """Raises RuntimeError, with the numbers, if no host of the cluster has so many GPUs."""
    largest = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    if largest < gpus:
        raise RuntimeError(
            f"placement 'colocated' needs {gpus} GPUs on one host, but the largest of the Ray cluster "
            f"has {largest:g}"
        )


def _start_keepers(plan: SlotPlan, group: PlacementGroup, index: int) -> list[Any] | None:
    """One in each bundle of the slot; None if another replica has it."""
    first = index * plan.gpus_per_slot
    keepers = []
    for place in range(plan.gpus_per_slot):
        keeper = ray.remote(Keeper).options(
            name=f"{plan.name}-slot-{index}" if place == 0 else None,
            num_cpus=0,
            num_gpus=plan.engine_share,
            scheduling_strategy=in_bundle(group, first + place),
            max_restarts=-1,  # one that is killed must not give its GPU away while the engine runs on it
        )
        try:
            keepers.append(keeper.remote())
        except ValueError:  # Ray's word for a name that is taken
            return None
    return keepers


async def _kept(plan: SlotPlan, index: int, keepers: list[Any], timeout_s: float) -> Slot:
    places = await asyncio.wait_for(
        asyncio.gather(*[_answer(keeper.where.remote()) for keeper in keepers]), timeout_s
    )
    host = ray.get_runtime_context().get_node_id()
    elsewhere = {node for node, _ in places} - {host}
    if elsewhere:
        raise RuntimeError(
            f"the GPUs of slot {index} are on host {elsewhere.pop()}, but Serve has placed this replica on "
            f"{host}: placement 'colocated' needs a cluster of one host; use 'separate' on several"
        )
    return Slot(index=index, gpus=tuple(gpu for _, gpu in places), keepers=tuple(keepers))


async def _existing_group(plan: SlotPlan) -> PlacementGroup | None:
    """The group of this fleet, if there is one; a fleet of another size gives its own up first."""
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    while (group := _find_group(plan.name)) is not None:
        if group.bundle_count == plan.gpus:
            return group
        if time.monotonic() > deadline:
            remove_placement_group(group)
        await asyncio.sleep(_POLL_S)
    return None


def _find_group(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:  # there is none
        return None


async def _until_free(group: PlacementGroup) -> None:
    """Until nobody holds a share of its GPUs, or `FREE_TIMEOUT_S` have passed."""
    name = f"GPU_group_{group.id.hex()}"
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while time.monotonic() < deadline:
        if ray.available_resources().get(name, 0.0) >= group.bundle_count:
            return
        await asyncio.sleep(_POLL_S)


async def _answer(reference: Any) -> Any:
    return await reference
