"""vLLM's weight-sync client over a Serve handle of the controller.

vLLM's trainer engines make four calls. This client turns each of them into a step of a round, under the
publisher's lease. It is synchronous, like vLLM's protocol: never call it inside an event loop.

The controller may die during any of these calls. A round that is not closed yet is aborted by its successor,
and is to be sent again. A close is asked again of the successor, which knows a round by its number.
"""

import time
from collections.abc import Callable
from typing import Any

from deployments.errors import FleetUnavailable, SlipstreamError, StalePublisher, TransferAborted
from deployments.logs import serve_logger
from deployments.lost_calls import REPEAT_S, RESTART_WAIT_S, is_lost, repeated
from deployments.protocol.publishing import Lease, RoundOptions, RoundReport
from deployments.protocol.status import FleetStatus
from deployments.unary import UnaryHandle
from deployments.weights.wire.cuda_ipc_handles import encode_payload

CALL_TIMEOUT_S = 600.0  # the controller has deadlines of its own; this one ends a call to a hung controller
CLEAN_UP_TIMEOUT_S = 10.0  # what does not arrive is undone by the end of the lease
_RETURNING = "returning"  # a member that has not polled since the controller restarted

logger = serve_logger()


class FleetWeightSyncClient:
    """An implementation of vLLM's `VLLMWeightSyncClient` for one publisher of the fleet.

    The lease is acquired by the first call that needs it, renewed while a call runs, and released when the
    round ends. `update_weights` may run in a thread of its own beside the thread of all other calls.

    Every method raises what the controller raises (`StalePublisher`: the lease was lost; `RoundAborted`,
    `Conflict`, `FleetUnavailable`), `TransferAborted` with {"send_again": true} if the controller is lost
    before the round is closed, and `FleetUnavailable` if it does not answer within `CALL_TIMEOUT_S`, or has
    no successor within `RESTART_WAIT_S`.

    Args:
        publisher: the name under which the lease is held.
        options: how rounds commit.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    Attributes:
        label: of the next round; stated when the round is closed.
        report: of the last round; None while a round is open or if it failed.
    """

    def __init__(
        self,
        controller: UnaryHandle,
        publisher: str,
        options: RoundOptions,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._controller = controller
        self._publisher = publisher
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self.label: str | None = None
        self.report: RoundReport | None = None
        self._lease: Lease | None = None
        self._round_id: int | None = None

    def fleet(self) -> FleetStatus:
        """The fleet's status; needs no lease.

        After a restart of the controller it waits until all who served have returned or are given up.
        """
        deadline = self._clock() + RESTART_WAIT_S
        while True:
            status: FleetStatus = self._repeated("fleet")
            returning = [each for each in status.members if each.state == _RETURNING]
            if not returning or self._clock() >= deadline:
                return status
            self._sleep(REPEAT_S)

    # -- vLLM's protocol ----------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._once("connect", self._token(), init_info)

    def start_weight_update(self) -> None:
        self.report = None
        self._round_id = self._once("open_round", self._token(), self._options)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._once("send", self._token(), self._round_id, encode_payload(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the round and release the lease. `weight_version` takes precedence over `label`."""
        label = weight_version if weight_version is not None else self.label
        self.report = self._repeated("close_round", self._token(), self._round_id, label)
        self._round_id = None
        self.release()

    # -- the end of a round that failed -------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort the open round, if there is one, and release the lease."""
        round_id, self._round_id = self._round_id, None
        lease = self._lease
        try:
            if round_id is not None and lease is not None:
                aborting = self._controller.abort_round.remote(lease.token, round_id, reason)
                aborting.result(timeout_s=CLEAN_UP_TIMEOUT_S)
        finally:  # if the controller has aborted the round already, it raises why
            self.release()

    def release(self) -> None:
        """Release the lease, if there is one, so that others can publish. If that fails, it expires."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            self._controller.release.remote(lease.token).result(timeout_s=CLEAN_UP_TIMEOUT_S)
        except Exception as error:  # the round is over, and its outcome must not be hidden
            if not (is_lost(error) or isinstance(error, SlipstreamError | TimeoutError)):
                raise
            logger.info("the lease of %r is not released and expires: %s", self._publisher, error)

    def _token(self) -> int:
        if self._lease is None:
            self._lease = self._repeated("acquire", self._publisher)
        return self._lease.token

    def _once(self, method: str, *args: Any) -> Any:
        """A call that must not be repeated: if it is lost, so is the round."""
        try:
            return self._call(method, *args)
        except Exception as error:
            if not is_lost(error):
                raise
            self._lease = None  # a successor knows no lease
            raise TransferAborted(
                f"the controller was lost during {method!r}, and the round with it; connect and send again",
                {"send_again": True},
            ) from error

    def _repeated(self, method: str, *args: Any) -> Any:
        """A call that changes nothing when it is repeated."""

        def call() -> Any:
            try:
                return self._call(method, *args)
            except Exception as error:
                if is_lost(error):
                    self._lease = None  # a successor knows no lease, and must not be asked to renew it
                raise

        what = method if self._round_id is None else f"{method} of round {self._round_id}"
        return repeated(call, what, clock=self._clock, sleep=self._sleep)

    def _call(self, method: str, *args: Any) -> Any:
        """Call the controller, and renew the lease until it answers: a long transfer may outlast it."""
        response = getattr(self._controller, method).remote(*args)
        deadline = self._clock() + CALL_TIMEOUT_S
        while (lease := self._lease) is not None and self._clock() < deadline:
            try:
                return response.result(timeout_s=lease.duration_s / 3)
            except TimeoutError:
                try:
                    self._renew(lease)
                except StalePublisher:
                    if method != "close_round":
                        raise
                    self._lease = None  # the round may be decided all the same: its record says so
                    return self._call(method, *args)
        try:
            return response.result(timeout_s=max(0.0, deadline - self._clock()))
        except TimeoutError as error:
            raise FleetUnavailable(
                f"the controller has not answered {method!r} within {CALL_TIMEOUT_S:g} s"
            ) from error

    def _renew(self, lease: Lease) -> None:
        """A renewal that has no answer in time is not the end: the call itself may have one."""
        try:
            self._controller.renew.remote(lease.token).result(timeout_s=lease.duration_s / 3)
        except TimeoutError:
            logger.warning("the controller does not answer: the lease of %r is not renewed", self._publisher)
