"""vLLM 0.32's RL routes with fleet meaning: one address, as if the fleet were one server.

Same names, parameters and answers as `vllm/entrypoints/rl/online/api_router.py`; an answer of 200
says that every replica did it. vLLM's clients carry no lease: all of them are the publisher
"http", and whoever calls in the wrong order, or while another publisher holds the lease, gets 409.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.http.bodies import field, json_object
from app.http.fleet_routes import Table
from app.http.ipc_handles import refuse_or_restrict
from deployments.errors import Conflict, InvalidRequest
from deployments.protocol import FleetOperation, RoundOptions

PUBLISHER = "http"
RENEW_S = 5.0
PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_TAGS = ("weights", "kv_cache", "scheduling")


class WeightRoutes:
    def __init__(self, controller: DeploymentHandle, max_body_bytes: int, *, allow_pickled_ipc: bool) -> None:
        self._controller = controller
        self._max_body_bytes = max_body_bytes
        self._allow_pickled_ipc = allow_pickled_ipc

    def table(self) -> Table:
        return [
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/init_weight_transfer_engine", self.init),
            ("POST", "/start_weight_update", self.start),
            ("POST", "/update_weights", self.update),
            ("POST", "/finish_weight_update", self.finish),
            ("POST", "/shutdown_weight_transfer_engine", self.shutdown),
            ("GET", "/get_world_size", self.get_world_size),
            ("GET", "/weight_info", self.weight_info),
            ("POST", "/update_weight_version", self.update_weight_version),
            ("POST", "/weight_checker", self.weight_checker),
            ("POST", "/abort_requests", self.abort_requests),
            ("POST", "/sleep", self.sleep),
            ("POST", "/wake_up", self.wake_up),
            ("GET", "/is_sleeping", self.is_sleeping),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def init(self, request: Request) -> Response:
        init_info = field(await self._body(request), "init_info", dict)
        async with self._turn() as (token, round_id):
            if round_id is not None:
                raise Conflict(f"round {round_id} is open: finish it before the engine is set up again")
            await self._controller.connect.remote(token, init_info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start(self, request: Request) -> Response:
        async with self._turn() as (token, round_id):
            if round_id is not None:
                raise Conflict(f"start_weight_update came twice: round {round_id} is open; finish it first")
            # Its publisher is an outside program, which does not write to the fleet's store.
            await self._controller.open_round.remote(token, None, RoundOptions(persist=True))
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        payload = field(await self._body(request), "update_info", (dict, list))
        payload = refuse_or_restrict(payload, allowed=self._allow_pickled_ipc)
        async with self._turn() as (token, round_id):
            _must_be_open(round_id, "update_weights")
            await self._renewing(token, self._controller.send.remote(token, round_id, payload))
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> Response:
        label = field(await self._body(request), "weight_version", str, None)
        async with self._turn() as (token, round_id):
            _must_be_open(round_id, "finish_weight_update")
            await self._controller.close_round.remote(token, round_id, None, label)
        return JSONResponse({"message": "Weight update finished"})

    async def shutdown(self, request: Request) -> Response:
        async with self._turn() as (token, round_id):
            if round_id is not None:
                raise Conflict("Cannot release a trainer connection during a weight update")
            await self._controller.disconnect.remote(token)
        return JSONResponse({"message": "Weight transfer shut down"})

    async def get_world_size(self, request: Request) -> Response:
        include_dp = request.query_params.get("include_dp", "true").lower() not in ("false", "0")
        fleet = await self._controller.fleet.remote()
        sizes = [member["world_size"] for member in fleet["members"]]
        return JSONResponse({"world_size": fleet["workers"] if include_dp else max(sizes, default=0)})

    async def weight_info(self, request: Request) -> Response:
        fleet = await self._controller.fleet.remote()
        label = fleet["label"]
        return JSONResponse({"weight_version": str(fleet["committed_version"]) if label is None else label})

    async def update_weight_version(self, request: Request) -> Response:
        label = field(await self._body(request), "new_version", str)
        await self._controller.set_label.remote(label)
        return JSONResponse({"success": True, "new_version": label})

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        clear = _flag(request, "clear_cache", default=True)
        await self._call(FleetOperation.PAUSE, mode=mode, clear_cache=clear)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._call(FleetOperation.RESUME)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": all((await self._call(FleetOperation.IS_PAUSED)).values())})

    async def abort_requests(self, request: Request) -> Response:
        wanted = field(await self._body(request), "request_ids", list, None)
        counts = await self._call(FleetOperation.ABORT_REQUESTS, request_ids=wanted)
        return JSONResponse({"status": "aborted", "aborted": sum(counts.values())})

    async def sleep(self, request: Request) -> Response:
        """At level 1 the weights wait in host memory; at level 2 they are gone, and a round has to bring them
        before the KV cache wakes. While a round is open no memory is given back."""
        level = request.query_params.get("level", "1")
        mode = request.query_params.get("mode", "abort")
        if level not in ("0", "1", "2") or mode not in PAUSE_MODES:
            raise InvalidRequest(
                f"level must be 0, 1 or 2 and mode one of {PAUSE_MODES}, got {level!r}, {mode!r}"
            )
        await self._call(FleetOperation.SLEEP, level=int(level), mode=mode)
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """All parts, or by `tags`: weights, kv_cache. Refused if the fleet would compute with weights that
        a sleep at level 2 threw away."""
        # Each once: a tag that comes twice is an error in the middle of vLLM's own bookkeeping.
        tags = list(dict.fromkeys(request.query_params.getlist("tags")))
        if unknown := [tag for tag in tags if tag not in SLEEP_TAGS]:
            raise InvalidRequest(f"tags must be of {SLEEP_TAGS}, got {unknown}")
        await self._call(FleetOperation.WAKE_UP, tags=tags or None)
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": all((await self._call(FleetOperation.IS_SLEEPING)).values())})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._call(
            FleetOperation.RESET_PREFIX_CACHE,
            reset_running_requests=_flag(request, "reset_running_requests", default=False),
            reset_connector=_flag(request, "reset_external", default=False),
        )
        return Response(status_code=200)

    async def weight_checker(self, request: Request) -> Response:
        body = await self._body(request)
        action = field(body, "action", str)
        if action not in ("checksum", "compare"):
            raise InvalidRequest(f"action must be 'checksum' or 'compare', got {action!r}")
        checksums = _agreed(await self._call(FleetOperation.WEIGHT_CHECKER))
        if action == "checksum":
            return JSONResponse({"checksums": checksums})
        baseline = field(body, "baseline", dict)
        names = checksums.keys() | baseline.keys()
        wrong = sorted(name for name in names if checksums.get(name) != baseline.get(name))
        return JSONResponse({"match": not wrong, "mismatches": wrong})

    async def _body(self, request: Request) -> dict[str, Any]:
        return await json_object(request, self._max_body_bytes)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[tuple[int, int | None]]:
        """The lease for one call: its token and the open round. It is kept only while a round is open."""
        token, round_id = await self._controller.session.remote(PUBLISHER)
        try:
            yield token, round_id
        finally:
            token, round_id = await self._controller.session.remote(PUBLISHER)
            if round_id is None:
                await self._controller.release.remote(token)

    async def _renewing(self, token: int, call: Awaitable[Any]) -> None:
        """Wait for a call of the open round; the client that waits for it cannot renew the lease itself."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait({task}, timeout=RENEW_S))[0]:
            await self._controller.renew.remote(token)
        await task

    async def _call(self, operation: FleetOperation, **arguments: Any) -> dict[str, Any]:
        return dict(await self._controller.call.remote(operation, arguments))


def _must_be_open(round_id: int | None, call: str) -> None:
    if round_id is None:
        raise Conflict(f"{call} came before start_weight_update: no round is open")


def _flag(request: Request, name: str, *, default: bool) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false, got {text!r}")
    return text.lower() in ("true", "1")


def _agreed(answers: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    """The checksums that all replicas agree on.

    Raises:
        Conflict: replicas differ; names the tensors.
    """
    merged = [{k: v for worker in workers for k, v in worker.items()} for workers in answers.values()]
    seen = Counter((name, value) for checksums in merged for name, value in checksums.items())
    differing = sorted({name for (name, _), count in seen.items() if count != len(merged)})
    if differing:
        raise Conflict(
            f"replicas differ in {len(differing)} tensors: {differing[:5]}", {"tensors": differing}
        )
    return merged[0] if merged else {}
