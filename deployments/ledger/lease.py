"""One publisher at a time: a lease with a fencing token, so that a publisher that was away too long
cannot write into its successor's round."""

from deployments.errors import Conflict, StalePublisher
from deployments.protocol import Lease


class LeaseDesk:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last_token = 0
        self._expires = 0.0
        self.held: Lease | None = None

    def restart_after(self, token: int) -> None:
        self._last_token = token

    def acquire(self, publisher: str, now: float) -> Lease:
        """Raises Conflict while another publisher holds it."""
        if self.held is not None and self.held.publisher != publisher:
            remaining_s = round(self._expires - now, 1)
            raise Conflict(
                f"{self.held.publisher!r} publishes; its lease ends in {remaining_s} s unless it is renewed",
                {"holder": self.held.publisher, "remaining_s": remaining_s},
            )
        self._last_token += 1
        self.held = Lease(publisher=publisher, token=self._last_token, duration_s=self._lease_s)
        self._expires = now + self._lease_s
        return self.held

    def renew(self, token: int, now: float) -> Lease:
        """Every call of the holder renews. Raises StalePublisher for any token but the current one."""
        held = self.held
        if held is None or held.token != token:
            holder = None if held is None else held.publisher
            state = "nobody holds the lease" if held is None else f"{holder!r} holds the lease"
            raise StalePublisher(
                f"token {token} is stale: {state} (last token {self._last_token}); acquire a new one",
                {"token": token, "last_token": self._last_token, "holder": holder},
            )
        self._expires = now + self._lease_s
        return held

    def release(self) -> None:
        self.held = None

    def remaining_s(self, now: float) -> float:
        return 0.0 if self.held is None else max(0.0, self._expires - now)
