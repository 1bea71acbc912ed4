"""A load of an adapter: how far it is, why it cannot become live, and how it is taken back."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.ledger.adapters.catalog import LoadTimes
from deployments.ledger.members import Member, PendingCall, join_reasons
from deployments.ledger.membership import Membership
from deployments.protocol.adapters import Adapter, LoadAdapter
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, SlipstreamError


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """One version on its way to be live."""

    adapter: Adapter
    times: LoadTimes
    call: PendingCall | None = None  # None: its files are being copied
    asked: set[str] = field(default_factory=set)  # incarnations
    rejected: dict[str, str] = field(default_factory=dict)  # replica id -> why
    error: SlipstreamError | None = None
    decided: bool = False

    @property
    def stored(self) -> bool:
        """The fleet's copy is durable; it is not live before."""
        return self.times.stored is not None

    @property
    def wanted(self) -> bool:
        """Replicas are to hold it, or may."""
        return self.call is not None and self.error is None and not self.rejected


def check_idle(loads: Iterable[Load], name: str) -> None:
    """Raises Conflict if a version with this name, or this full name, is being loaded."""
    load = next((it for it in loads if name in (it.adapter.name, it.adapter.full_name)), None)
    if load is not None:
        raise Conflict(
            f"The lora adapter '{load.adapter.name}' is being loaded as version {load.adapter.version}: "
            "wait for its answer",
            {"lora_name": load.adapter.name, "version": load.adapter.version},
        )


def fault(load: Load, membership: Membership) -> SlipstreamError | None:
    """Why it cannot become live; None: nothing is known against it."""
    serving = membership.serving()
    if load.rejected:
        if any(asked_to_load(each, load.adapter.adapter_id) for each in membership.live()):
            return None  # it may accept
        others = any(load.adapter.adapter_id in each.adapters.held for each in serving)
        kind = Conflict if others else InvalidRequest
        reasons = set(load.rejected.values())
        text = reasons.pop() if len(reasons) == 1 and not others else join_reasons(load.rejected)
        return kind(
            f"The lora adapter '{load.adapter.name}' is not loaded, on any replica: {text}",
            {"replicas": dict(load.rejected)},
        )
    if len(serving) < max(1, membership.needed):
        return FleetUnavailable(
            f"The lora adapter '{load.adapter.name}' is not loaded: {len(serving)} replicas serve, and "
            f"{max(1, membership.needed)} are needed"
        )
    return None


def withdrawn(load: Load, membership: Membership) -> bool:
    """Take back what no replica has received yet; whether no replica has it, or may still get it."""
    adapter_id, has_it = load.adapter.adapter_id, False
    for member in membership.live():
        for queued in list(member.queue):
            body = queued.instruction.body
            if isinstance(body, LoadAdapter) and body.adapter.adapter_id == adapter_id:
                if queued.delivered:
                    has_it = True
                    continue
                member.queue.remove(queued)
                if queued.call is not None:
                    queued.call.waiting.discard(member)
        has_it = has_it or adapter_id in member.adapters.held
    return not has_it


def asked_to_load(member: Member, adapter_id: int) -> bool:
    """Whether it is to load this one, and has not said that it did."""
    bodies = (queued.instruction.body for queued in member.queue)
    return any(isinstance(body, LoadAdapter) and body.adapter.adapter_id == adapter_id for body in bodies)
