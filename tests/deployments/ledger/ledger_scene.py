"""A ledger with fake replicas, a virtual clock and a disk, for the tables."""

from typing import Any

from deployments.ledger.decisions import Decision, Step
from deployments.ledger.ledger import Ledger
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Task
from deployments.ledger.store_assignment import StorePlace
from deployments.protocol import FleetOperation, InstructionKind, RoundOptions, RoundReport
from tests.deployments.ledger.fake_replica import FakeReplica

STORE = StorePlace(directory="/store", keep=3)


class Scene:
    """A ledger, its replicas, a clock and a disk."""

    def __init__(self, replicas: int = 0, world_size: int = 1, **config: Any) -> None:
        self.config = LedgerConfig(**config)
        self.now = 100.0
        self.journal: list[Decision] = []
        self.ledger = Ledger(self.config, STORE)
        self.ledger.recover([], self.now)
        self.replicas: list[FakeReplica] = []
        self.token = 0
        for _ in range(replicas):
            self.start(world_size=world_size)

    def start(self, **fields: Any) -> FakeReplica:
        name = f"r{len(self.replicas)}"
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", **fields)
        self.replicas.append(replica)
        self.poll(1)
        return replica

    def poll(self, times: int = 3, *, only: list[FakeReplica] | None = None) -> None:
        for _ in range(times):
            for replica in self.replicas if only is None else only:
                directive = self.ledger.poll(replica.report(), self.now)
                self.journal += self.ledger.take_decisions()
                replica.take(directive)

    def wait(self, elapsed_s: float, *, poll: bool = True) -> None:
        """Let time pass second by second, with replicas that poll."""
        for _ in range(int(elapsed_s)):
            self.now += 1.0
            if poll:
                self.poll(1)
            self.ledger.tick(self.now)

    def connect(self, init_info: dict[str, Any] | None = None) -> Task:
        self.token = self.ledger.acquire("trainer", self.now).token
        task = self.ledger.connect(self.token, {} if init_info is None else init_info, self.now)
        self.poll()
        return task

    def open(self, **options: Any) -> int:
        task = self.ledger.open_round(self.token, None, RoundOptions(**options), self.now)
        self.poll()
        if task.error is not None:
            raise task.error
        return int(task.result)

    def send(self, round_id: int, payload: Any = None) -> Task:
        return self.ledger.send(self.token, round_id, {} if payload is None else payload, self.now)

    def close(self, round_id: int) -> Task:
        return self.ledger.close_round(self.token, round_id, None, None, self.now)

    def publish(self, **options: Any) -> Task:
        self.connect()
        task = self.close(self.open(**options))
        self.poll(8)
        return task

    def ask(self, text: str) -> Task:
        """An operation on the fleet, see `step`; nobody has heard of it yet."""
        wanted = step(text)
        return self.ledger.call(wanted.operation, wanted.arguments, self.now)

    def call(self, text: str) -> Task:
        task = self.ask(text)
        self.poll()
        return task

    def restart(self) -> None:
        self.journal += self.ledger.take_decisions()
        self.ledger = Ledger(self.config, STORE)
        self.ledger.recover(self.journal, self.now)
        self.journal += self.ledger.take_decisions()

    def state_of(self, replica: FakeReplica) -> str:
        members = self.ledger.status(self.now)["members"]
        return next((str(e["state"]) for e in members if e["replica_id"] == replica.replica_id), "gone")


def report_of(task: Task) -> RoundReport:
    assert task.done and task.error is None, task.error
    report: RoundReport = task.result
    return report


def step(text: str) -> Step:
    """`sleep 2`, `wake_up weights,kv_cache`, `pause keep`: an operation and its argument."""
    name, _, argument = text.partition(" ")
    operation = FleetOperation(name)
    arguments: dict[str, Any] = {}
    if operation is FleetOperation.SLEEP:
        arguments = {"level": int(argument), "mode": "abort"}
    elif operation is FleetOperation.WAKE_UP:
        arguments = {"tags": argument.split(",") if argument else None}
    elif operation is FleetOperation.PAUSE:
        arguments = {"mode": argument, "clear_cache": True}
    return Step(operation=operation, arguments=arguments)


def condition(texts: list[str]) -> tuple[Step, ...]:
    return tuple(step(text) for text in texts)


def operations(replica: FakeReplica) -> list[str]:
    return [each.args["operation"] for each in replica.ran if each.kind is InstructionKind.CALL]
