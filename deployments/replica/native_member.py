"""`staging: none`: vLLM's own transfer engines load into the live model, inside a pause.

    RECEIVE   the first payload pauses the scheduler; from then on the weights are torn
    VERIFY    loading ends; the digest of the live parameters stands for the version
    COMMIT    the version; generation goes on (after RELEASE, if all swap together)
    DROP      there is no way back once a byte came: this replica is broken, and says so

So a fault after the first byte fences the replica, and Serve builds another one, which catches up. The
tensors pass through vLLM's engine unseen: nothing is kept for the store.
"""

import time
from math import prod
from pathlib import Path
from typing import Any

import torch

from deployments.protocol import KvCache
from deployments.replica.engine import Engine, EngineSpec
from deployments.replica.follower import Rejected
from deployments.replica.staged_member import EngineMember
from deployments.weights.wire.checkpoint_schema import join_reasons, mismatches, read_schema
from deployments.weights.wire.chunk_layout import parse

Offered = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class NativeMember(EngineMember):
    """Args:
    model: the checkpoint that the engine was started from; it says which tensors an update must have.
    one_payload: a version comes as one payload, so what is missing is known before the first byte.
    """

    def __init__(self, engine: Engine, model: str, *, one_payload: bool) -> None:
        super().__init__(engine)
        self._expected = read_schema(Path(model))
        self._one_payload = one_payload
        self._offered: Offered = {}
        self._options: dict[str, Any] = {}
        self._paused = 0.0  # when
        self._stage_s = 0.0

    async def interrupt(self) -> None:
        """Nothing can: vLLM's engine waits for its peer inside the engine's own loop."""

    async def _connect(self, args: dict[str, Any]) -> None:
        await self._engine.workers("init_weight_transfer_engine", init_info=args["init_info"])
        await self._engine.workers("native_check_connected")

    async def _begin(self, args: dict[str, Any]) -> None:
        self._options = args
        self._offered = {}
        self._stage_s = 0.0

    async def _receive(self, args: dict[str, Any]) -> None:
        offered = _tensors_of(args["payload"])
        self._check(offered, complete=self._one_payload)
        if not self.torn:
            await self._tear()
        begin = time.perf_counter()
        await self._engine.workers("native_update", payload=args["payload"])
        self._stage_s += time.perf_counter() - begin
        self._offered |= offered

    async def _verify(self, args: dict[str, Any]) -> dict[str, Any]:
        self._check(self._offered, complete=True)
        if not self.torn:
            raise Rejected("no tensors came")
        begin = time.perf_counter()
        await self._engine.workers("finish_weight_update")
        digests = await self._engine.workers("native_digest")
        self._staged = {
            "bytes": sum(dtype.itemsize * prod(shape) for dtype, shape in self._offered.values()),
            "stage_s": self._stage_s,
            "verify_s": time.perf_counter() - begin,
        }
        return {"digest": ",".join(digests), **self._staged}

    async def _commit(self, args: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        await self._engine.llm.engine_core.set_weight_version_async(str(args["version"]))
        if args["kv_cache"] == KvCache.KEEP:
            await self._engine.llm.reset_prefix_cache()
        self._engine.version = args["version"]
        self.torn, self.staged_round = False, None
        if not args["hold"]:
            await self._engine.release()
        end = time.perf_counter()
        return {"swap_s": end - begin, "gap_s": end - self._paused, **self._staged}

    async def _drop(self, args: dict[str, Any]) -> None:
        if self.torn:
            raise RuntimeError("its weights are a mixture of two versions ('staging: none' has no way back)")

    async def _tear(self) -> None:
        """Stop generating, and open vLLM's session on the live model."""
        self._paused = time.perf_counter()
        recompute = self._options["kv_cache"] == KvCache.RECOMPUTE
        await self._engine.llm.engine_core.pause_scheduler_async(
            mode=str(self._options["in_flight"]), clear_cache=recompute
        )
        self.torn, self.staged_round = True, self._options["round_id"]
        await self._engine.workers("start_weight_update")

    def _check(self, offered: Offered, *, complete: bool) -> None:
        """Raises Rejected before the first byte, RuntimeError after it."""
        if self._expected is None:
            return
        problems = mismatches(self._expected, offered, complete=complete)
        if problems:
            raise RuntimeError(join_reasons(problems)) if self.torn else Rejected(join_reasons(problems))


def member_of(engine: Engine, spec: EngineSpec) -> EngineMember:
    """What steers an engine, by where an update waits for its commit."""
    if spec.staging != "none":
        return EngineMember(engine)
    return NativeMember(engine, spec.model, one_payload=spec.backend == "nccl")


def _tensors_of(payload: Any) -> Offered:
    """What vLLM's engines announce: parallel lists, the same for every worker.

    Raises:
        Rejected: they are missing, or do not fit together.
    """
    first = payload[0] if isinstance(payload, list) else payload
    try:
        tensors = parse(first["names"], first["dtype_names"], first["shapes"])
    except (KeyError, TypeError, ValueError) as error:
        raise Rejected(f"expected names, dtype_names and shapes of the tensors: {error}") from error
    return {name: (dtype, shape) for name, dtype, shape in tensors}
