"""vLLM's weight-sync client over a publish session: each of its four calls is a step of a round."""

import asyncio
from typing import Any

from deployments.calls.publish_session import PublishSession
from deployments.calls.rpc import RESTART_WAIT_S, RETRY_S, CallHandle, retried, run_sync
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.protocol.responses import FleetStatus
from deployments.weights.wire.cuda_ipc_handles import encode_payload

_RETURNING = "returning"  # a member that has not polled since the controller restarted


class FleetWeightSyncClient:
    """An implementation of vLLM's `VLLMWeightSyncClient` for one publisher of the fleet.

    It is synchronous, like vLLM's protocol: never call it inside an event loop. `update_weights` may run in a
    thread of its own beside the thread of all other calls. Errors are those of `PublishSession`.

    Args:
        publisher: the name under which the lease is held.
        options: how rounds commit.

    Attributes:
        label: of the next round; stated when the round is closed.
        report: of the last round; None while a round is open or if it failed.
    """

    def __init__(self, controller: CallHandle, publisher: str, options: RoundOptions) -> None:
        self._controller = controller
        self._session = PublishSession(controller, publisher)
        self._options = options
        self.label: str | None = None
        self.report: RoundReport | None = None

    def fleet(self) -> FleetStatus:
        """The fleet's status; needs no lease.

        After a restart of the controller it waits until all who served have returned or are given up.
        """
        return run_sync(self._fleet())

    async def _fleet(self) -> FleetStatus:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RESTART_WAIT_S
        while True:
            status: FleetStatus = await retried(lambda: self._controller.fleet.remote(), "fleet")
            returning = [each for each in status.members if each.state == _RETURNING]
            if not returning or loop.time() >= deadline:
                return status
            await asyncio.sleep(RETRY_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        run_sync(self._session.connect(init_info))

    def start_weight_update(self) -> None:
        self.report = None
        run_sync(self._session.open(self._options))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        run_sync(self._session.send(encode_payload(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the round and release the lease. `weight_version` takes precedence over `label`."""
        label = weight_version if weight_version is not None else self.label
        self.report = run_sync(self._session.close(label))
        self.release()

    def abort(self, reason: str) -> None:
        """Abort the open round, if there is one, and release the lease."""
        run_sync(self._session.abort(reason))

    def release(self) -> None:
        """Release the lease, if there is one, so that others can publish."""
        run_sync(self._session.release())
