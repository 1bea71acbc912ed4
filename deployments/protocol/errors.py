"""One exception per decision that a caller can make.

Clients retry a POST on 500, 502 and 503. So 503 means: send the same call again; one that failed for good, or
may have been carried out, is 409.

    SlipstreamError               a response to a caller, with an HTTP status
    ├── InvalidRequest            fix the call: what was expected and what came        400
    │   ├── PayloadTooLarge       send less                                            413
    │   ├── OverQuota             wait, or end what you have                           429
    │   ├── BodyTooSlow           send it faster                                       408
    │   ├── NotFound              name something that exists                           404
    │   └── MethodNotAllowed      another method                                       405
    ├── Conflict                  another caller's turn, or a call out of order        409
    │   ├── StalePublisher        take a new lease                                     409
    │   └── OtherStep             learn from the batch again                           409
    ├── RoundAborted              the fleet still serves the old version; try again    409
    │   └── TransferAborted       replicas are intact: connect and send again          409
    ├── DeadlyRequest             replicas were lost under it: do not send it again    422
    ├── ReplicaUnavailable        send the request to another replica                  503
    ├── FleetUnavailable          wait (Retry-After), then try again                   503
    └── AnswerLost                check whether it was done before you try again       409

Inside a replica and a publisher, never sent over HTTP: `PayloadRejected`, `TransferFailed`. On the terminal,
when a fleet starts: `JournalError`.
"""

from typing import Any


class JournalError(OSError):
    """The state directory or the store cannot be used; the message says what to change."""


class PayloadRejected(Exception):
    """The publisher's payload is wrong; this replica is intact."""


class TransferFailed(Exception):
    """A peer is gone or too late; this side is intact, and the round can be sent again. `missing_ranks`:
    members of the transfer group known not to have answered."""

    def __init__(self, message: str, missing_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks


def printable(text: str) -> str:
    """UTF-8 for JSON: half a surrogate, as in a file name of other bytes, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


class SlipstreamError(Exception):
    """`detail` has JSON types only."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, detail: dict[str, Any] | None = None) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.detail = detail if detail is not None else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.detail)

    def body(self) -> dict[str, Any]:
        return {"error": {"type": self.type, "message": self.message, "detail": self.detail}}


class InvalidRequest(SlipstreamError):
    status = 400
    type = "invalid_request"


class PayloadTooLarge(InvalidRequest):
    status = 413
    type = "payload_too_large"


class OverQuota(InvalidRequest):
    status = 429
    type = "over_quota"


class BodyTooSlow(InvalidRequest):
    status = 408
    type = "body_too_slow"


class NotFound(InvalidRequest):
    status = 404
    type = "not_found"


class MethodNotAllowed(InvalidRequest):
    """`detail` has {"allow": methods}."""

    status = 405
    type = "method_not_allowed"


class Conflict(SlipstreamError):
    status = 409
    type = "conflict"


class StalePublisher(Conflict):
    type = "stale_publisher"


class OtherStep(Conflict):
    """`detail` has {"expected": steps, "actual": steps}."""

    type = "other_step"


class RoundAborted(SlipstreamError):
    status = 409
    type = "round_aborted"


class TransferAborted(RoundAborted):
    """`detail` has {"send_again": true}: send the round from its beginning, not only the failed call."""


class DeadlyRequest(SlipstreamError):
    """`detail` has {"refused_for_s": seconds}, and "replicas" where they are known.

    Clients repeat a 5xx; OpenAI's also 408, 409 and 429.
    """

    status = 422
    type = "deadly_request"


class ReplicaUnavailable(SlipstreamError):
    status = 503
    type = "replica_unavailable"


class FleetUnavailable(SlipstreamError):
    status = 503
    type = "fleet_unavailable"


class AnswerLost(SlipstreamError):
    status = 409
    type = "answer_lost"
