"""The publisher's hold on the controller: vLLM's weight-sync client over a Serve handle.

vLLM's trainer engines drive four calls; this client makes each one a step of a round, under the
publisher's lease, and keeps the report. It is synchronous, as vLLM's protocol is: never call it
inside an event loop.
"""

import time
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.protocol import Lease, RoundOptions, RoundReport
from deployments.weights.wire.cuda_ipc_handles import encode_payload

CALL_TIMEOUT_S = 600.0  # the controller has deadlines of its own; this one ends a call to a dead one


class FleetWeightSyncClient:
    """Implements vLLM's `VLLMWeightSyncClient`.

    Args:
        publisher: the name that others are told while this one holds the lease.
        options: how the next rounds commit; may be changed between rounds.
    """

    def __init__(self, controller: DeploymentHandle, publisher: str, options: RoundOptions) -> None:
        self._controller = controller
        self._publisher = publisher
        self.options = options
        self.report: RoundReport | None = None
        self._lease: Lease | None = None
        self._round_id: int | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("connect", self._token(), init_info)

    def start_weight_update(self) -> None:
        self.report = None
        self._round_id = self._call("open_round", self._token(), None, self.options)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("send", self._token(), self._round_id, encode_payload(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        label = weight_version if weight_version is not None else self.options.label
        self.report = self._call("close_round", self._token(), self._round_id, None, label)
        self._round_id = None
        self.release()

    def abort(self, reason: str) -> None:
        """Give the open round up, if there is one, and the lease."""
        round_id, self._round_id = self._round_id, None
        try:
            if round_id is not None:
                self._call("abort_round", self._token(), round_id, reason)
        finally:  # the fleet may have aborted it already, and says so
            self.release()

    def release(self) -> None:
        """Let others publish."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._call("release", lease.token)

    def _token(self) -> int:
        if self._lease is None:
            self._lease = self._call("acquire", self._publisher)
        return self._lease.token

    def _call(self, method: str, *args: Any) -> Any:
        """Wait for the controller, and keep the lease meanwhile: a long transfer may outlast it."""
        response = getattr(self._controller, method).remote(*args)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while self._lease is not None and time.monotonic() < deadline:
            try:
                return response.result(timeout_s=self._lease.duration_s / 3)
            except TimeoutError:
                self._controller.renew.remote(self._lease.token).result(timeout_s=CALL_TIMEOUT_S)
        return response.result(timeout_s=max(0.0, deadline - time.monotonic()))
