"""Lets a policy place a trace on simulated replicas.

    trajectory: asks ─► a router: policy ─► replica: waits, prefill, decode ─► environment ─► asks again

A new version comes every `version_s`, and takes the prefix caches with it. Replicas report what they have of
each router every `report_s`.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.routing.policies import Asked, Known, Policy
from benchmarks.routing.replica import BLOCK, Block, Engine, Replica, Running
from benchmarks.routing.trace import Text, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a trace runs on.

    Attributes:
        at_once: trajectories under way at most: the next one begins when one ends. None: all at once.
    """

    replicas: int = 8
    routers: int = 1
    at_once: int | None = None
    version_s: float = 60.0
    report_s: float = 0.75
    engine: Engine = field(default_factory=Engine)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Times in seconds."""

    latencies: list[float] = field(default_factory=list)  # of trajectories
    done: float = 0.0  # the last answer
    queried: int = 0
    hits: int = 0
    imbalance: float = 0.0  # the highest load divided by the mean, averaged over requests


@dataclass(slots=True, kw_only=True)
class _Request:
    trajectory: Trajectory
    turn: int
    router: int
    replica_id: str
    load: int


class Simulation:
    """One run."""

    def __init__(
        self,
        fleet: Fleet,
        trace: Sequence[Trajectory],
        text: Text,
        policy: Callable[[random.Random], Policy],
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._text = text
        self._replicas = {f"replica-{i}": Replica(engine=fleet.engine) for i in range(fleet.replicas)}
        self._policies = [policy(random.Random(seed + 1 + i)) for i in range(fleet.routers)]
        self._sent: list[Counter[str]] = [Counter() for _ in range(fleet.routers)]
        self._known = [
            Known(
                own=self._sent[i],
                others=dict.fromkeys(self._replicas, 0),
                versions=dict.fromkeys(self._replicas, 0),
            )
            for i in range(fleet.routers)
        ]
        self._version = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._planned: dict[str, int] = {}  # the number of a replica's event that is valid
        self._begun: dict[int, float] = {}
        self._left = iter(trace)
        self._blocks = {each.number: tuple(_blocks(each)) for each in trace}
        self._under_way = 0
        self._imbalances: list[float] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Until the last answer."""
        for _ in range(self._fleet.at_once or 1 << 30):
            if not self._begin(0.0):
                break
        self._at(self._fleet.version_s, self._update)
        self._at(self._fleet.report_s, self._report)
        while self._under_way:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self.outcome.queried = sum(each.queried for each in self._replicas.values())
        self.outcome.hits = sum(each.hits for each in self._replicas.values())
        self.outcome.imbalance = sum(self._imbalances) / len(self._imbalances)
        return self.outcome

    def _at(self, when: float, event: Callable[[float], None]) -> int:
        number = next(self._order)
        heapq.heappush(self._events, (when, number, event))
        return number

    def _begin(self, now: float) -> bool:
        trajectory = next(self._left, None)
        if trajectory is None:
            return False
        self._under_way += 1
        self._begun[trajectory.number] = now
        self._at(now, lambda at: self._ask(trajectory, 0, at))
        return True

    def _ask(self, trajectory: Trajectory, turn: int, now: float) -> None:
        router = self._rng.randrange(self._fleet.routers)
        body = self._text.body(trajectory, turn)
        asked = Asked(body=body, session=trajectory.session)
        name = self._policies[router](asked, self._known[router])
        request = _Request(
            trajectory=trajectory,
            turn=turn,
            router=router,
            replica_id=name,
            load=self._policies[router].load(asked),
        )
        self._sent[router][name] += request.load
        replica = self._replicas[name]
        each = trajectory.turns[turn]
        blocks = self._blocks[trajectory.number][: (each.prompt + each.output) // BLOCK]
        sequence = Running(blocks=blocks, prompt=each.prompt, output=each.output, payload=request)
        replica.waiting.append(sequence)
        loads = [each.load for each in self._replicas.values()]
        self._imbalances.append(max(loads) * len(loads) / sum(loads))
        if name in self._planned:
            self._plan(name, replica.interrupt(now))
        else:
            self._schedule(name, now)

    def _schedule(self, name: str, now: float) -> None:
        ends = self._replicas[name].plan(now)
        if ends is None:
            self._planned.pop(name, None)
        else:
            self._plan(name, ends)

    def _plan(self, name: str, ends: float) -> None:
        def event(now: float) -> None:
            if self._planned.get(name) == number:
                for ended in self._replicas[name].step():
                    self._answered(ended, now)
                self._schedule(name, now)

        number = self._at(ends, event)
        self._planned[name] = number

    def _answered(self, ended: Running, now: float) -> None:
        request = ended.payload
        assert isinstance(request, _Request)
        trajectory = request.trajectory
        self._sent[request.router][request.replica_id] -= request.load
        turn = request.turn + 1
        if turn < len(trajectory.turns):
            self._at(now + trajectory.turns[turn - 1].think_s, lambda at: self._ask(trajectory, turn, at))
            return
        self.outcome.latencies.append(now - self._begun[trajectory.number])
        self.outcome.done = now
        self._under_way -= 1
        self._begin(now)

    def _update(self, now: float) -> None:
        self._version += 1
        for replica in self._replicas.values():
            replica.change_weights()
        self._at(now + self._fleet.version_s, self._update)

    def _report(self, now: float) -> None:
        for index, known in enumerate(self._known):
            for name in self._replicas:
                known.others[name] = sum(sent[name] for sent in self._sent) - self._sent[index][name]
                known.versions[name] = self._version
        self._at(now + self._fleet.report_s, self._report)


def _blocks(trajectory: Trajectory) -> Iterator[Block]:
    """The names of all its whole blocks."""
    last = trajectory.turns[-1]
    for index in range((last.prompt + last.output) // BLOCK):
        end = (index + 1) * BLOCK
        if end <= trajectory.shared:
            yield "shared", 0, index
        elif end <= trajectory.prompt:
            yield "group", trajectory.group, index
        else:
            yield "own", trajectory.number, index
