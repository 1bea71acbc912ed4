"""vLLM 0.32's LoRA routes (`entrypoints/serve/lora/api_router.py`), applied on all replicas or none."""

import uuid

from starlette.responses import PlainTextResponse

from app.http.requests import LoadAdapterBody, UnloadAdapterBody
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle, retried
from deployments.protocol.adapters import LOAD_TIMEOUT_S, Adapter, LoadRequest
from deployments.protocol.responses import AdapterList, Status


class AdapterRoutes:
    def __init__(self, controller: CallHandle) -> None:
        self._controller = controller

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("POST", "/v1/load_lora_adapter", self.load, response_class=PlainTextResponse),
            GuardedRoute("POST", "/v1/unload_lora_adapter", self.unload, response_class=PlainTextResponse),
            GuardedRoute("POST", "/load_lora_adapter", self.load_in_place),
            GuardedRoute("GET", "/fleet/adapters", self.adapters),
        ]

    async def load(self, body: LoadAdapterBody) -> PlainTextResponse:
        """Load an adapter into every replica, as the next version of its name."""
        full_name = await self._load(body, in_place=body.load_inplace)
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' added successfully.",
            headers={"x-adapter": full_name} if full_name.isascii() else None,
        )

    async def unload(self, body: UnloadAdapterBody) -> PlainTextResponse:
        """Unload all versions of a name, or one `name@version`. Running requests finish on theirs."""
        await self._controller.unload_adapter.remote(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def load_in_place(self, body: LoadAdapterBody) -> Status:
        """prime-rl's route: load a version of a name that may be live."""
        await self._load(body, in_place=True)
        return Status(status="ok")

    async def adapters(self) -> AdapterList:
        """Versions that are live, loading, or still used by running requests."""
        return AdapterList(adapters=await self._controller.adapters.remote())

    async def _load(self, body: LoadAdapterBody, *, in_place: bool) -> str:
        """Load an adapter; returns its full name. If the controller dies, its successor is asked for the same
        load, and knows whether it was decided."""
        load = LoadRequest(
            name=body.lora_name,
            path=body.lora_path,
            in_place=in_place,
            is_3d=body.is_3d_lora_weight,
            load_id=uuid.uuid4().hex,
        )
        adapter: Adapter = await retried(self._controller, "load_adapter", load, limit_s=LOAD_TIMEOUT_S)
        return adapter.full_name
