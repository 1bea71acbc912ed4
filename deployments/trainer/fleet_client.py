"""vLLM's weight-sync client over a Serve handle of the controller.

vLLM's trainer engines make four calls. This client turns each of them into a step of a round, under the
publisher's lease. It is synchronous, like vLLM's protocol: never call it inside an event loop.
"""

import time
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.protocol.publishing import Lease, RoundOptions, RoundReport
from deployments.protocol.status import FleetStatus
from deployments.weights.wire.cuda_ipc_handles import encode_payload

CALL_TIMEOUT_S = 600.0  # the controller has deadlines of its own; this one ends a call to a dead controller
STATUS_TIMEOUT_S = 30.0


class FleetWeightSyncClient:
    """An implementation of vLLM's `VLLMWeightSyncClient` for one publisher of the fleet.

    The lease is acquired by the first call that needs it, renewed while a call runs, and released when the
    round ends. `update_weights` may run in a thread of its own beside the thread of all other calls.

    Every method raises what the controller raises (`StalePublisher`: the lease was lost; `RoundAborted`,
    `Conflict`, `FleetUnavailable`), and `TimeoutError` if the controller does not answer within
    `CALL_TIMEOUT_S`.

    Args:
        publisher: the name under which the lease is held.
        options: how rounds commit.
        clock: seconds, monotonic.

    Attributes:
        label: of the next round; stated when the round is closed.
        report: of the last round; None while a round is open or if it failed.
    """

    def __init__(
        self,
        controller: DeploymentHandle,
        publisher: str,
        options: RoundOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._publisher = publisher
        self._options = options
        self._clock = clock
        self.label: str | None = None
        self.report: RoundReport | None = None
        self._lease: Lease | None = None
        self._round_id: int | None = None

    def fleet(self) -> FleetStatus:
        """The fleet's status; needs no lease."""
        status: FleetStatus = self._controller.fleet.remote().result(timeout_s=STATUS_TIMEOUT_S)
        return status

    # -- vLLM's protocol ----------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("connect", self._token(), init_info)

    def start_weight_update(self) -> None:
        self.report = None
        self._round_id = self._call("open_round", self._token(), self._options)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("send", self._token(), self._round_id, encode_payload(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the round and release the lease. `weight_version` takes precedence over `label`."""
        label = weight_version if weight_version is not None else self.label
        self.report = self._call("close_round", self._token(), self._round_id, label)
        self._round_id = None
        self.release()

    # -- the end of a round that failed -------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort the open round, if there is one, and release the lease."""
        round_id, self._round_id = self._round_id, None
        try:
            if round_id is not None:
                self._call("abort_round", self._token(), round_id, reason)
        finally:  # if the controller has aborted the round already, it raises why
            self.release()

    def release(self) -> None:
        """Release the lease, if there is one, so that others can publish."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._call("release", lease.token)

    def _token(self) -> int:
        if self._lease is None:
            self._lease = self._call("acquire", self._publisher)
        return self._lease.token

    def _call(self, method: str, *args: Any) -> Any:
        """Call the controller, and renew the lease until it answers: a long transfer may outlast it."""
        response = getattr(self._controller, method).remote(*args)
        deadline = self._clock() + CALL_TIMEOUT_S
        while (lease := self._lease) is not None and self._clock() < deadline:
            try:
                return response.result(timeout_s=lease.duration_s / 3)
            except TimeoutError:
                self._controller.renew.remote(lease.token).result(timeout_s=CALL_TIMEOUT_S)
        return response.result(timeout_s=max(0.0, deadline - self._clock()))
