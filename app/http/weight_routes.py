"""vLLM 0.32's weight-update routes (`vllm/entrypoints/rl/online/api_router.py`), as if the fleet were one
server.

200 means every replica did it; 409 means a wrong order, or another publisher holds the lease.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Query
from pydantic import TypeAdapter

from app.http.ipc_handles import refuse_or_restrict
from app.http.requests import (
    AbortUpdateBody,
    FinishUpdateBody,
    InitEngineBody,
    UpdateWeightsBody,
    WeightCheckerBody,
    WeightVersionBody,
)
from app.http.route import Controller, Directories, Routes, of_app
from deployments.calls.publish_session import PublishSession, joined
from deployments.calls.rpc import CallHandle
from deployments.protocol import responses
from deployments.protocol.engine_state import WeightChecksums
from deployments.protocol.errors import Conflict
from deployments.protocol.publishing import RoundOptions

PUBLISHER = "http"  # shared by all clients of these routes, which carry no lease
_CHECKSUMS = TypeAdapter(dict[str, list[dict[str, str]]])  # per replica, worker and tensor name


routes = Routes()


@routes("POST", "/init_weight_transfer_engine", large=True)
async def init(controller: Controller, body: InitEngineBody) -> dict[str, str]:
    """Connect every replica to the publisher's transfer group."""
    session = await joined(controller, PUBLISHER)
    if session.round_id is not None:
        raise Conflict(f"{_open(session)} before the engine is initialized again")
    await session.connect(body.init_info)
    return {"message": "Weight transfer initialized"}


@routes("POST", "/start_weight_update")
async def start(controller: Controller) -> dict[str, str]:
    """Open a round."""
    session = await joined(controller, PUBLISHER)
    if session.round_id is not None:
        raise Conflict(f"start_weight_update was called twice: {_open(session)}")
    # An external program does not write to the store.
    await session.open(RoundOptions(persist=True))
    return {"message": "Weight update started"}


@routes("POST", "/update_weights", large=True)
async def update(
    controller: Controller,
    directories: Directories,
    allow_pickled_ipc: Annotated[bool, of_app("allow_pickled_ipc")],
    body: UpdateWeightsBody,
) -> dict[str, str]:
    """Send one payload of the open round: one for all workers, or a list with one per worker.

    With `weight_dir` it is a whole round from a directory, as `/fleet/publish`.
    """
    if body.weight_dir is not None:
        await directories.publish(body.weight_dir, None)
        return {"message": "Weights updated"}
    # In a thread: thousands of pickled handles take seconds.
    payload = await asyncio.to_thread(refuse_or_restrict, body.update_info, allowed=allow_pickled_ipc)
    session = await joined(controller, PUBLISHER, of_round=True)
    await _require_round(controller, session, "update_weights")
    await session.send(payload)
    return {"message": "Weights updated"}


@routes("POST", "/finish_weight_update", large=True)
async def finish(controller: Controller, body: FinishUpdateBody) -> dict[str, str]:
    """Close the round: every replica serves the new weights, or none does.

    If the controller dies meanwhile, its successor reports the outcome.
    """
    session = await joined(controller, PUBLISHER, of_round=True)
    await _require_round(controller, session, "finish_weight_update")
    await session.close(body.weight_version)
    return {"message": "Weight update finished"}


@routes("POST", "/abort_weight_update")
async def abort(controller: Controller, body: AbortUpdateBody) -> dict[str, str]:
    """Give up a round of these routes: its publisher has failed. Not vLLM's."""
    session = await joined(controller, PUBLISHER)
    if session.round_id != body.round_id:
        raise Conflict(f"round {body.round_id} is not open")
    await session.abort("its publisher has failed")
    return {"message": "Weight update aborted"}


@routes("POST", "/shutdown_weight_transfer_engine")
async def shutdown(controller: Controller) -> dict[str, str]:
    """Disconnect every replica from the publisher's transfer group."""
    session = await joined(controller, PUBLISHER)
    if session.round_id is not None:
        raise Conflict(f"Cannot release a trainer connection during a weight update: {_open(session)}")
    await session.disconnect()
    return {"message": "Weight transfer shut down"}


@routes("GET", "/get_world_size")
async def get_world_size(
    controller: Controller,
    include_dp: Annotated[bool, Query(description="count the workers of every replica")] = True,
) -> responses.WorldSize:
    """The workers of the whole fleet, or of one replica."""
    fleet: responses.FleetStatus = await controller.fleet.remote()
    one = max((member.world_size for member in fleet.members), default=0)
    return responses.WorldSize(world_size=fleet.workers if include_dp else one)


@routes("GET", "/weight_info")
async def weight_info(controller: Controller) -> dict[str, str]:
    """The label of the committed version, or its number."""
    fleet: responses.FleetStatus = await controller.fleet.remote()
    version = str(fleet.committed_version) if fleet.label is None else fleet.label
    return {"weight_version": version}


@routes("POST", "/update_weight_version", large=True)
async def update_weight_version(controller: Controller, body: WeightVersionBody) -> dict[str, str | bool]:
    """Give the committed version another label."""
    await controller.set_label.remote(body.new_version)
    return {"success": True, "new_version": body.new_version}


@routes("POST", "/weight_checker", large=True)
async def weight_checker(
    controller: Controller, body: WeightCheckerBody
) -> dict[str, bool | Sequence[str] | Mapping[str, str]]:
    """Checksums of the weights that the replicas hold, or a comparison with a baseline."""
    answers = await controller.call.remote(WeightChecksums())
    checksums = agreed(_CHECKSUMS.validate_python(answers))
    if body.action == "checksum" or body.baseline is None:
        return {"checksums": checksums}
    names = checksums.keys() | body.baseline.keys()
    differing = sorted(name for name in names if checksums.get(name) != body.baseline.get(name))
    return {"match": not differing, "mismatches": differing}


async def _require_round(controller: CallHandle, session: PublishSession, call: str) -> None:
    if session.round_id is not None:
        return
    rounds = await controller.rounds.remote()
    last = ""
    if rounds:  # the call came late or twice
        last = f"; the last one, round {rounds[-1].round_id}, is {rounds[-1].phase}"
        last += f": {rounds[-1].reason}" if rounds[-1].reason else f" as version {rounds[-1].version}"
    raise Conflict(f"{call} was called before start_weight_update: no round is open{last}")


def _open(session: PublishSession) -> str:
    left_s = math.ceil(session.remaining_s)
    return f"round {session.round_id} is open: finish it, or wait {left_s} s until it is given up"


def agreed(answers: Mapping[str, Sequence[Mapping[str, str]]]) -> dict[str, str]:
    """The checksums on which all replicas agree. Raises Conflict, which names the tensors."""
    merged = [{k: v for worker in workers for k, v in worker.items()} for workers in answers.values()]
    seen = Counter((name, value) for checksums in merged for name, value in checksums.items())
    differing = sorted({name for (name, _), count in seen.items() if count != len(merged)})
    if differing:
        raise Conflict(
            f"replicas differ in {len(differing)} tensors: {differing[:5]}", {"tensors": differing}
        )
    return merged[0] if merged else {}
