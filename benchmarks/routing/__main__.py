"""Policies of the router in one table, and what a choice costs.

    python -m benchmarks.routing                       (about ten minutes on one core)
    python -m benchmarks.routing --scenario "turns" --policy Slipstream --load-factor 1.5 --seeds 8

Every policy gets the same traces. No engine runs: times are those of the model in `replica`.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks.routing.policies import POLICIES, Ours
from benchmarks.routing.simulation import Fleet, Outcome, Simulation
from benchmarks.routing.trace import Shape, Text, make_trace
from deployments.protocol.routing import Demand, RoutingStats
from deployments.router.affinity import Affinity, block_hashes
from deployments.router.request_router import FleetRequestRouter

OURS = "Slipstream"
TURNS = Shape(groups=32, prompt=2000, shared=1500, turns=8, output=250, observation=600)
SESSIONS = replace(TURNS, sessions=True)
ONE_TURN = Shape(groups=64, prompt=1000, shared=500, turns=1, output=1000, output_sigma=0.9)
SCENARIOS = {
    "one turn": (ONE_TURN, Fleet(replicas=8)),
    "turns": (TURNS, Fleet(replicas=4)),
    "turns, 2 routers": (TURNS, Fleet(replicas=4, routers=2)),
    "turns, sessions": (SESSIONS, Fleet(replicas=4)),
    "turns, sessions, 2 routers": (SESSIONS, Fleet(replicas=4, routers=2)),
    "turns, 128 at once": (TURNS, Fleet(replicas=4, at_once=128)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation."""

    scenario: str
    policy: str
    seed: int
    load_factor: float

    def __call__(self) -> Outcome:
        shape, fleet = SCENARIOS[self.scenario]
        made = partial(Ours, load_factor=self.load_factor) if self.policy == OURS else POLICIES[self.policy]
        trace = make_trace(shape, self.seed)
        return Simulation(fleet, trace, Text(self.seed), made, self.seed).run()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--load-factor", type=float, default=1.25, help="of ours")
    parser.add_argument("--seeds", type=int, default=4, help="traces of each scenario")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args(arguments)
    print(
        "| scenario | policy | trajectory, mean (s) | p99 (s) | last answer (s) | prefix hits | imbalance |"
    )
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(args.processes) as pool:
        for scenario, policy in itertools.product(args.scenario, args.policy):
            runs = [
                Run(scenario=scenario, policy=policy, seed=seed, load_factor=args.load_factor)
                for seed in range(1, args.seeds + 1)
            ]
            print(_row(scenario, policy, list(pool.map(Run.__call__, runs))), flush=True)
    print("\n| replicas | with a home (µs) | without session (µs) | hashing 4, 64, 1,024 KiB (µs) |")
    print("|---|---|---|---|")
    for replicas in (2, 16, 256):
        print(_cost_row(replicas), flush=True)


def _row(scenario: str, policy: str, outcomes: Sequence[Outcome]) -> str:
    """Means over the seeds."""
    p99 = [statistics.quantiles(each.latencies, n=100)[98] for each in outcomes]
    cells = (
        scenario,
        policy,
        f"{statistics.mean(statistics.mean(each.latencies) for each in outcomes):.1f}",
        f"{statistics.mean(p99):.0f}",
        f"{statistics.mean(each.done for each in outcomes):.0f}",
        f"{100 * sum(each.hits for each in outcomes) / sum(each.queried for each in outcomes):.0f} %",
        f"{statistics.mean(each.imbalance for each in outcomes):.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def _cost_row(replicas: int) -> str:
    """What one choice costs in Serve's hook, and what it costs to hash a prompt."""
    names = [f"rollout#{number:08x}" for number in range(replicas)]
    known: Any = [_replica(name, number) for number, name in enumerate(names)]
    affinity = Affinity()
    prompt = list(range(60))
    for name in names:  # a system prompt that all have, and one that has more
        affinity.sent(name, 5, session_id=None, blocks=prompt[:8])
    affinity.sent(names[1], 5, session_id=None, blocks=prompt)
    common: Any = {"in_flight": dict.fromkeys(names, 4), "router": "mine", "load_factor": 1.25}
    home = _choice_us(known, Demand(session_id="s", home=names[0], **common))
    without = _choice_us(known, Demand(holders=partial(affinity.holders, prompt), **common))
    sizes = (4, 64, 1024)
    hashed = [_microseconds(partial(block_hashes, b'{"prompt":"%s"}' % (b"a" * 1024 * n))) for n in sizes]
    shown = ", ".join(f"{each:.0f}" for each in hashed)
    return f"| {replicas} | {home:.0f} | {without:.0f} | {shown} |"


def _replica(name: str, number: int) -> SimpleNamespace:
    stats = RoutingStats(version=5, in_flight={"mine": 4, "other": number % 3})
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=asdict(stats))


def _choice_us(replicas: Any, demand: Demand) -> float:
    router = FleetRequestRouter.__new__(FleetRequestRouter)  # Serve's own state plays no part in a choice
    pending: Any = SimpleNamespace(args=[demand], routing_context=SimpleNamespace(should_backoff=False))
    with asyncio.Runner() as runner:

        async def choose(times: int) -> float:
            began = time.process_time()
            for _ in range(times):
                await router.choose_replicas(replicas, pending)
            return (time.process_time() - began) / times * 1e6

        return min(runner.run(choose(200)) for _ in range(20))


def _microseconds(call: "partial[list[int]]", times: int = 20) -> float:
    """Of this process alone, whatever else the machine does: the least of several means."""
    taken = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(times):
            call()
        taken.append((time.process_time() - began) / times * 1e6)
    return min(taken)


if __name__ == "__main__":
    main()
