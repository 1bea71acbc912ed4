"""The controller's calls for adapters: the ledger decides, and files are copied here."""

import asyncio
import re

from pydantic import JsonValue

from deployments.controller.adapter_files import AdapterKeeper
from deployments.controller.durable_ledger import DurableLedger
from deployments.errors import FleetUnavailable, InvalidRequest, SlipstreamError
from deployments.ledger.ledger import Ledger
from deployments.ledger.members import PendingCall
from deployments.protocol.adapters import Adapter, AdapterFiles, AdapterStatus
from deployments.protocol.json_values import json_only

_LOAD_ID = re.compile(r"[0-9a-f]{32}")


class AdapterCalls:
    """Base of the controller: Serve knows only methods of one class.

    Args:
        ledger: decides which adapters are live.
        durable: waits for the ledger and records it.
        files: keeps a copy of each adapter's files.
    """

    def __init__(self, ledger: Ledger, durable: DurableLedger, files: AdapterKeeper) -> None:
        self._ledger, self._durable, self._adapter_files = ledger, durable, files

    async def load_adapter(
        self,
        name: str,
        path: str,
        in_place: bool = False,
        is_3d: bool = False,
        after: int | None = None,
        load_id: str = "",
        digest: str = "",
    ) -> Adapter:
        """Make an adapter live on all replicas; see `Adapters.begin` and `stage`.

        Args:
            digest: of files that nobody changes any more, see `AdapterStore.copy`; replicas compare it with
                what they read.

        Raises:
            InvalidRequest: the name or the files are wrong, or all replicas rejected them.
            Conflict: the name is being loaded or not at version `after`, or some replicas rejected the files.
            FleetUnavailable: too few replicas serve.
        """
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            adapters, now = self._ledger.adapters, self._durable.now
            adapter = adapters.begin(
                name, in_place=in_place, is_3d=is_3d, now=now(), after=after, load_id=load_id
            )
            try:
                await self._durable.durable(self._durable.change())  # no successor gives this id to others
                files = await self._adapter_files.copy(path, adapter.adapter_id, digest)
            except BaseException as error:  # a caller that left, too: the name is free again
                adapters.give_up(adapter, str(error), now())
                raise
            call = await self._staged(adapter, files)
            live: Adapter = await self._durable.result(call)
            return live

    async def _staged(self, adapter: Adapter, files: AdapterFiles) -> PendingCall:
        """Replicas load the fleet's copy, or what they have received, while the copy is being synced. It is
        live when both are done."""
        adapters, now = self._ledger.adapters, self._durable.now
        call = adapters.stage(adapter, files, now())
        self._ledger.advance(now())
        self._durable.change()
        completing = asyncio.create_task(self._adapter_files.complete(adapter.adapter_id))
        try:
            await asyncio.shield(completing)
            adapters.complete(adapter, now())
        except BaseException as error:  # a caller that left, too
            completing.cancel()
            failure = error if isinstance(error, SlipstreamError) else FleetUnavailable(str(error))
            adapters.fail(adapter, failure)
            if failure is not error:
                raise
        finally:
            self._ledger.advance(now())
            self._durable.change()
        return call

    async def send_adapter(self, token: int, load_id: str, payload: JsonValue) -> None:
        """Returns once every replica has received an adapter's files, for the load with this `load_id`.

        Raises:
            InvalidRequest: the payload is not JSON, or no such id.
            Conflict: replicas are without it and load the fleet's copy, or the publisher is not connected.
        """
        async with self._durable.answer():
            if _LOAD_ID.fullmatch(load_id) is None:  # a part of a directory's name
                raise InvalidRequest(f"load_id: expected 32 hexadecimal digits, got {load_id[:80]!r}")
            checked = json_only(payload, "payload")
            now = self._durable.now()
            await self._durable.result(self._ledger.send_adapter(token, load_id, checked, now))

    async def load_result(self, load_id: str) -> Adapter | None:
        """What a load has made live whose answer was lost; waits for its end. None: it is not loaded."""
        async with self._durable.answer():
            await self._durable.wait(self._ledger.is_complete, None)
            await self._durable.wait(lambda: self._ledger.adapters.settled(load_id), None)
            return self._ledger.adapters.loaded(load_id)

    async def unload_adapter(self, name: str) -> None:
        """No request begins with it any more, on any replica; see `Adapters.unload`."""
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            call = self._ledger.adapters.unload(name, self._durable.now())
            self._ledger.advance(self._durable.now())
            await self._durable.result(call)

    async def adapters(self) -> list[AdapterStatus]:
        """Those that are retired, live and being loaded."""
        async with self._durable.answer():
            return self._ledger.adapters.status()
