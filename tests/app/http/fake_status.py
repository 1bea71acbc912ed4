"""A fleet's status and a round's report, as a controller states them."""

from collections.abc import Sequence

from deployments.protocol.publishing import ReplicaTimings, RoundReport
from deployments.protocol.responses import FleetStatus, MemberStatus, RoundStatus, SizeStatus


def status(
    version: int, serving: Sequence[str], *, label: str | None = None, round_id: int | None = None
) -> FleetStatus:
    members = [
        MemberStatus(
            replica_id=replica_id,
            incarnation=f"{replica_id}-a",
            state="serving",
            admitted=True,
            version=version,
            world_size=2,
            silent_s=0.1,
            pending=(),
            reason="",
        )
        for replica_id in serving
    ]
    current = None
    if round_id is not None:
        current = RoundStatus(
            round_id=round_id,
            version=version + 1,
            label=None,
            phase="staging",
            age_s=0.5,
            participants=serving,
        )
    return FleetStatus(
        fleet_id="fleet",
        committed_version=version,
        label=label,
        stored_version=version - 1,
        epoch=2,
        ready=bool(serving),
        min_replicas=1,
        size=SizeStatus(wanted=1, least=1, most=1, running=len(serving), joining=0, leaving=0, problem=None),
        workers=2 * len(members),
        members=members,
        round=current,
        lease=None,
        connected=None,
        rounds_ended={"committed": version, "aborted": 4},
        store_problem=None,
        condition=(),
    )


def report(round_id: int, version: int, label: str | None = None, phase: str = "committed") -> RoundReport:
    return RoundReport(
        round_id=round_id,
        version=version,
        label=label,
        epoch=2,
        phase=phase,
        reason="",
        duration_s=2.0,
        replicas={"replica-0": ReplicaTimings(stage_s=1.0, gap_s=0.5)} if phase == "committed" else {},
    )
