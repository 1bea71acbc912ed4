"""How long it took to notice a fault, and to be whole again."""

from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.arena import Arena
from tests.chaos.recording import Recording

# The promise is 2 s on a machine of its own (benchmarks/RESULTS.md); a test machine is busy.
BESIDE_ENGINE_S = 15.0
LOST = ("lost", "fence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds; None where it did not happen.

    Attributes:
        phase: of the round in flight when the fault was done, as events tell.
        detected_s: from the fault to the first loss of a replica.
        engine_s: from the start of the last replacement's process until its engine answered the controller.
        full_s: from the loss until as many replicas as before served the committed version.
    """

    phase: str
    lost: int
    detected_s: float | None
    engine_s: float | None
    full_s: float | None

    @property
    def beside_engine_s(self) -> float | None:
        """What full strength took beyond the start of an engine."""
        if self.full_s is None or self.engine_s is None:
            return None
        return self.full_s - self.engine_s

    def in_time(self, held_s: float) -> bool:
        """`held_s`: how long a round may stay open without its publisher; nobody joins meanwhile."""
        beside = self.beside_engine_s
        return beside is None or self.lost > 1 or beside <= held_s + BESIDE_ENGINE_S

    def as_dict(self) -> dict[str, Any]:
        rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(self).items()}
        beside = self.beside_engine_s
        return {**rounded, "beside_engine_s": None if beside is None else round(beside, 2)}


def recovery(recording: Recording, arena: Arena, struck: float) -> Recovery:
    """Of one case, whose fleet is whole again."""
    losses = [event for event in recording.events if event.name in LOST and event.at >= struck]
    phases = [e for e in recording.events if e.name == "round" and e.at <= struck]
    phase = str(max(phases, key=lambda event: event.at).fields["phase"]) if phases else "idle"
    full = engine = None
    lost = {event.fields["replica"] for event in losses}
    if losses:
        end = max(event.at for event in losses)
        whole = [s.at for s in recording.states if s.at > end and len(s.serving) >= arena.replicas]
        full = None if not whole else min(whole) - losses[0].at
        newest = arena.launched.named("replica")[-1].create_time()
        registered = [e.at for e in recording.events if e.name == "register" and e.at > max(newest, struck)]
        engine = None if newest < struck or not registered else min(registered) - newest
    else:
        full = 0.0
    return Recovery(
        phase=phase,
        lost=len(lost),
        detected_s=losses[0].at - struck if losses else None,
        engine_s=engine,
        full_s=full,
    )
