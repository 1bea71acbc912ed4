"""What the controller's instructions mean for an engine: the follower's hands."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from deployments.protocol import (
    CommitArgs,
    Directive,
    FleetOperation,
    InFlight,
    Instruction,
    InstructionKind,
    KvCache,
    Outcome,
    StoreResult,
)
from deployments.replica.engine import Engine
from deployments.replica.follower import Broken, Rejected
from deployments.replica.progress import StagingProgress

STAGING_POLL_S = 0.005
STORE_POLL_S = 0.5

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class EngineMember:
    """Carries instructions out on one engine, and keeps what the replica needs to know of itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._payloads = 0
        self._to_begin: dict[str, Any] | None = None  # a session that the workers do not know of yet
        self._progress: StagingProgress | None = None
        self._staged: dict[str, Any] = {}
        self.staged_round: int | None = None
        self.torn = False
        self._keeping: int | None = None  # the version that the open session keeps for the store
        self.kept_version: int | None = None
        self.store_result: StoreResult | None = None
        self._writing: asyncio.Task[None] | None = None
        self.admitted = False
        self.committed_version = engine.version
        self.fenced: str | None = None
        self.changed = asyncio.Condition()  # notified when admission or the version changes
        self._handlers: dict[InstructionKind, Handler] = {
            InstructionKind.CONNECT: self._connect,
            InstructionKind.BEGIN: self._begin,
            InstructionKind.RECEIVE: self._receive,
            InstructionKind.VERIFY: self._verify,
            InstructionKind.COMMIT: self._commit,
            InstructionKind.RELEASE: self._release,
            InstructionKind.DROP: self._drop,
            InstructionKind.CATCH_UP: self._catch_up,
            InstructionKind.CALL: self._call,
            InstructionKind.STORE: self._store,
            InstructionKind.FORGET: self._forget,
        }
        self._operations: dict[FleetOperation, Handler] = {
            FleetOperation.PAUSE: self._pause,
            FleetOperation.RESUME: self._resume,
            FleetOperation.IS_PAUSED: self._is_paused,
            FleetOperation.SLEEP: self._sleep,
            FleetOperation.WAKE_UP: self._wake_up,
            FleetOperation.IS_SLEEPING: self._is_sleeping,
            FleetOperation.RESET_PREFIX_CACHE: self._reset_prefix_cache,
            FleetOperation.ABORT_REQUESTS: self._abort_requests,
            FleetOperation.WEIGHT_CHECKER: self._weight_checker,
            FleetOperation.DISCONNECT: self._disconnect,
        }

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def world_size(self) -> int:
        return self._engine.world_size

    async def execute(self, instruction: Instruction) -> Any:
        if instruction.kind is InstructionKind.BEGIN and self._engine.weights_asleep:
            raise Rejected("its weights sleep; wake them before an update (POST /wake_up?tags=weights)")
        value = await self._handlers[instruction.kind](dict(instruction.args))
        async with self.changed:
            self.changed.notify_all()
        return value

    async def interrupt(self) -> None:
        await self._engine.workers("staging_drop")

    def admit(self, directive: Directive) -> None:
        self.admitted = directive.admitted
        self.committed_version = directive.committed_version

    async def fence(self, reason: str) -> None:
        self.fenced, self.admitted = reason, False
        async with self.changed:
            self.changed.notify_all()
        await self._engine.stop()

    async def _connect(self, args: dict[str, Any]) -> None:
        await self._engine.workers("init_weight_transfer_engine", init_info=args["init_info"])
        _judge(await self._ask_until(lambda state: bool(state["done"]), "staging_connected"))
        self._progress = await StagingProgress.open(self._engine)

    async def _begin(self, args: dict[str, Any]) -> None:
        # With the first payload: each call to the workers holds a decoding step up.
        self._payloads = 0
        self._keeping = args.get("keep")
        self._to_begin = {"keep": self._keeping}

    async def _receive(self, args: dict[str, Any]) -> None:
        share = self._engine.staging_share if self._engine.busy else 1.0
        begin, self._to_begin = self._to_begin, None
        await self._engine.workers("staging_receive", payload=args["payload"], share=share, begin=begin)
        self._payloads += 1
        states = await self._progress.until(self._payloads) if self._progress is not None else None
        if states is None:
            states = await self._ask_until(
                lambda state: bool(state["payloads_done"] >= self._payloads), "staging_progress"
            )
        _judge(states)

    async def _verify(self, args: dict[str, Any]) -> dict[str, Any]:
        begin, self._to_begin = self._to_begin, None
        if begin is not None:  # no payload came
            await self._engine.workers("staging_begin", **begin)
        states = self._progress.states() if self._progress is not None else None
        if states is None or not all(state["digest"] for state in states):
            states = await self._engine.workers("staging_verify")
        _judge(states)
        names = {state["digest"] for state in states}
        if len(names) > 1:
            raise RuntimeError(f"workers of one replica staged different tensors: {sorted(names)}")
        self.staged_round = args["round_id"]
        self._staged = {
            "bytes": sum(state["bytes"] for state in states),
            "stage_s": max(state["stage_s"] for state in states),
            "verify_s": max(state["verify_s"] for state in states),
        }
        return {"digest": states[0]["digest"], **self._staged}

    async def _commit(self, args: dict[str, Any]) -> dict[str, Any]:
        timings = await self._engine.commit(
            CommitArgs(
                round_id=args["round_id"],
                version=args["version"],
                label=args["label"],
                hold=args["hold"],
                kv_cache=KvCache(args["kv_cache"]),
                in_flight=InFlight(args["in_flight"]),
            )
        )
        self.staged_round = None
        self.kept_version = self._keeping
        return asdict(timings) | self._staged

    async def _release(self, args: dict[str, Any]) -> None:
        await self._engine.release()

    async def _drop(self, args: dict[str, Any]) -> None:
        self.staged_round = None
        await self._engine.workers("staging_drop")

    async def _catch_up(self, args: dict[str, Any]) -> None:
        await self._engine.load(args["path"], args["version"])

    async def _store(self, args: dict[str, Any]) -> None:
        """Begin to write; the reports tell how it ended."""
        await self._engine.workers("staging_store", **args)
        if self._writing is not None:
            self._writing.cancel()
        self._writing = asyncio.create_task(self._watch_writing(args["version"]))

    async def _watch_writing(self, version: int) -> None:
        while self.store_result is None or self.store_result.version < version:
            await asyncio.sleep(STORE_POLL_S)
            states = await self._engine.workers("staging_store_state")
            ended = [state for state in states if state is not None]
            if ended:
                self.store_result = StoreResult(**ended[0])

    async def _forget(self, args: dict[str, Any]) -> None:
        await self._engine.workers("staging_forget", version=args["version"])
        if self.kept_version is not None and self.kept_version <= args["version"]:
            self.kept_version = None

    async def _call(self, args: dict[str, Any]) -> Any:
        return await self._operations[FleetOperation(args["operation"])](dict(args["arguments"]))

    async def _pause(self, args: dict[str, Any]) -> None:
        await self._engine.llm.pause_generation(
            mode=args.get("mode", "abort"), clear_cache=args.get("clear_cache", True)
        )
        self._engine.paused_by_user = True

    async def _resume(self, args: dict[str, Any]) -> None:
        self._engine.paused_by_user = False
        await self._engine.release()

    async def _is_paused(self, args: dict[str, Any]) -> bool:
        return bool(await self._engine.llm.is_paused())

    async def _sleep(self, args: dict[str, Any]) -> None:
        await self._engine.sleep(level=args.get("level", 1), mode=args.get("mode", "abort"))

    async def _wake_up(self, args: dict[str, Any]) -> None:
        await self._engine.wake_up(args.get("tags"))

    async def _is_sleeping(self, args: dict[str, Any]) -> bool:
        return bool(await self._engine.llm.is_sleeping())

    async def _reset_prefix_cache(self, args: dict[str, Any]) -> bool:
        return bool(
            await self._engine.llm.reset_prefix_cache(
                reset_running_requests=args.get("reset_running_requests", False),
                reset_connector=args.get("reset_connector", False),
            )
        )

    async def _abort_requests(self, args: dict[str, Any]) -> int:
        llm, wanted = self._engine.llm, args.get("request_ids")
        if wanted:
            await llm.abort(wanted)
            return len(wanted)
        processor = llm.output_processor
        running = [*processor.request_states, *processor.parent_requests]
        await llm.abort(running, internal=True)
        return len(running)

    async def _weight_checker(self, args: dict[str, Any]) -> list[dict[str, str]]:
        return await self._engine.llm.compute_weight_checksums()

    async def _disconnect(self, args: dict[str, Any]) -> None:
        await self._engine.workers("shutdown_weight_transfer_engine")

    async def _ask_until(
        self, reached: Callable[[dict[str, Any]], bool], question: str
    ) -> list[dict[str, Any]]:
        """Ask the workers until it is true for all of them; they answer between two steps."""
        while True:
            states: list[dict[str, Any]] = await self._engine.workers(question)
            if all(map(reached, states)):
                return states
            await asyncio.sleep(STAGING_POLL_S)


def _judge(states: list[dict[str, Any]]) -> None:
    for state in states:
        if state["outcome"] == Outcome.REJECTED:
            raise Rejected(state["message"])
        if state["outcome"] == Outcome.BROKEN:
            raise Broken(state["message"])
        if state["outcome"] == Outcome.FAILED:
            raise RuntimeError(state["message"])
