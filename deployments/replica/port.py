"""What a follower controls: the port that members implement."""

from typing import Protocol

from deployments.condition import Condition
from deployments.protocol.adapters import AdapterState
from deployments.protocol.instructions import Body, Directive
from deployments.protocol.reports import Draining, StoreResult, Value


class Member(Protocol):
    """What a follower controls: an engine with its staging."""

    @property
    def version(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def staged_round(self) -> int | None: ...

    @property
    def partially_updated(self) -> bool:
        """Its live weights are being changed: any failure now is a failure of the replica."""

    @property
    def updates_in_place(self) -> bool:
        """RECEIVE changes its live weights."""

    @property
    def draining(self) -> Draining | None: ...

    @property
    def adapters(self) -> AdapterState: ...

    @property
    def condition(self) -> Condition:
        """Paused or asleep."""

    @property
    def retained_version(self) -> int | None: ...

    @property
    def loading_version(self) -> int | None: ...

    @property
    def store_result(self) -> StoreResult | None: ...

    @property
    def leaving(self) -> bool: ...

    @property
    def drained(self) -> bool: ...

    async def execute(self, body: Body) -> Value:
        """Carry out one instruction; the value is acknowledged.

        Raises:
            PayloadRejected: the payload is wrong.
            TransferFailed: a peer of the transfer is gone.
            Exception: this replica failed.
        """

    async def interrupt(self) -> None:
        """Break whatever the running instruction waits for; may hang if its engine does."""

    def on_directive(self, directive: Directive) -> None:
        """Take requests, or stop taking them; a fence takes effect at once."""

    async def fence(self, reason: str) -> None:
        """Stop for good, also if its engine hangs."""

    async def died(self) -> str:
        """Return when its engine has died; how it is known."""
