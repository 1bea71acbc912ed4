"""A trainer process and one engine, without Ray: what the GPU benchmarks drive.

trainer process                     this process (asyncio)
vLLM's trainer engine ── client ──► EngineMember ──► AsyncLLM        ours: staged, then a commit
                                    AsyncLLM                         native: loaded inside a pause
"""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0


@dataclass
class Times:
    """When a round began, was staged, and was live (seconds of `time.perf_counter`)."""

    begin: float = 0.0
    staged: float = 0.0
    live: float = 0.0
    verified: dict[str, Any] = field(default_factory=dict)


class Ours:
    """The replica's own path: the instructions that a controller would send."""

    def __init__(self, engine: Any, kv_cache: str = "keep") -> None:
        from deployments.replica.staged_member import EngineMember

        self.engine = engine
        self._member = EngineMember(engine)
        self.kv_cache = kv_cache
        self.version = engine.version
        self.times = Times()

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        await self._do("connect", init_info=info)

    async def start_weight_update(self) -> None:
        self.times = Times(begin=time.perf_counter())
        await self._do("begin", round_id=self.version + 1)

    async def update_weights(self, payload: Any) -> None:
        await self._do("receive", round_id=self.version + 1, payload=payload)

    async def finish_weight_update(self) -> None:
        self.times.verified = await self._do("verify", round_id=self.version + 1, manifest=None)
        self.times.staged = time.perf_counter()
        self.version += 1
        await self._do(
            "commit",
            round_id=self.version,
            version=self.version,
            label=None,
            hold=False,
            kv_cache=self.kv_cache,
            in_flight="keep",
        )
        self.times.live = time.perf_counter()

    async def _do(self, kind: str, **args: Any) -> Any:
        from deployments.protocol import Instruction, InstructionKind

        instruction = Instruction(seq=0, kind=InstructionKind(kind), args=args, deadline_s=TIMEOUT_S)
        return await asyncio.wait_for(self._member.execute(instruction), TIMEOUT_S)


class Native:
    """vLLM's own engines, inside a pause, as its examples do it."""

    def __init__(self, engine: Any, kv_cache: str = "keep") -> None:
        self._llm = engine.llm
        self.kv_cache = kv_cache
        self.times = Times()

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_weight_update(self) -> None:
        self.times = Times(begin=time.perf_counter())
        await self._llm.pause_generation(mode="keep", clear_cache=self.kv_cache == "recompute")
        await self._llm.start_weight_update()

    async def update_weights(self, payload: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=payload))

    async def finish_weight_update(self) -> None:
        await self._llm.finish_weight_update(None)
        self.times.staged = time.perf_counter()
        await self._llm.resume_generation()
        self.times.live = time.perf_counter()


class TrainerProcess:
    """A model on one GPU in a process of its own. `link` is where its client's calls go.

    Args:
        gpu: the trainer's GPU, of all those of the machine.
        dtype: of its parameters; they are sent in bfloat16.
    """

    def __init__(
        self, size: str, seed: int, *, gpu: int, tied: bool = False, dtype: str = "bfloat16"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_train, args=(theirs, size, seed, gpu, tied, dtype), daemon=True
        )
        self._process.start()
        self.size_bytes = int(self._pipe.recv())

    async def connect(self, link: Any, backend: str, workers: int, **options: Any) -> float:
        return float(await self._command(link, ("connect", backend, workers, options)))

    async def send(self, link: Any, seed: int | None = None) -> float:
        """One round, with other weights if a seed is given; seconds, as the trainer sees them."""
        return float(await self._command(link, ("send", seed)))

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    async def _command(self, link: Any, command: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        self._pipe.send(command)
        done = loop.create_future()
        threading.Thread(target=self._serve, args=(link, loop, done), daemon=True).start()
        return await asyncio.wait_for(done, 2 * TIMEOUT_S)

    def _serve(self, link: Any, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]) -> None:
        while True:
            kind, *rest = self._pipe.recv()
            if kind == "call":
                call: Callable[..., Awaitable[Any]] = getattr(link, rest[0])
                try:
                    asyncio.run_coroutine_threadsafe(call(*rest[1]), loop).result(TIMEOUT_S)  # type: ignore[arg-type]
                    self._pipe.send("")
                except Exception as error:  # told to the trainer, whose engine raises it
                    self._pipe.send(f"{type(error).__name__}: {error}")
            elif kind == "done":
                loop.call_soon_threadsafe(done.set_result, rest[0])
                return
            else:
                loop.call_soon_threadsafe(done.set_exception, RuntimeError(rest[0]))
                return


async def start_engine(model: str, backend: str, staging: str, **arguments: Any) -> Any:
    from deployments.replica.engine import Engine, EngineSpec

    chosen = {"max_model_len": 4096, "gpu_memory_utilization": 0.5, **arguments}
    spec = EngineSpec(model=model, served_model_name="m", backend=backend, staging=staging, arguments=chosen)
    return await Engine.start(spec, version=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _PipeClient:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, payload: Any) -> None:
        self._call("update_weights", payload)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, name: str, *args: Any) -> None:
        self._pipe.send(("call", name, args))
        failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)


def _train(pipe: Any, size: str, seed: int, gpu: int, tied: bool, dtype: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    import torch

    from benchmarks.models import random_model

    torch.cuda.set_device(0)
    model = random_model(size, seed, "cuda", tied=tied, dtype=dtype)
    pipe.send(sum(p.numel() * torch.bfloat16.itemsize for p in model.parameters()))
    engine: Any = None
    while True:
        command, *rest = pipe.recv()
        start = time.perf_counter()
        try:
            if command == "connect":
                if engine is not None:
                    engine.shutdown()
                engine = _trainer_engine(_PipeClient(pipe), model, *rest)
            else:
                if rest[0] is not None:
                    new = random_model(size, rest[0], "cuda", tied=tied, dtype=dtype)
                    with torch.no_grad():
                        for old, other in zip(model.parameters(), new.parameters(), strict=True):
                            old.copy_(other)
                    del new
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                engine.send_weights()
            pipe.send(("done", time.perf_counter() - start))
        except Exception as error:  # the benchmark's process raises it
            import traceback

            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _trainer_engine(client: Any, model: Any, backend: str, workers: int, options: dict[str, Any]) -> Any:
    import torch
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from deployments.trainer.publisher import PublishSource
    from deployments.vllm_plugin import register
    from trainers.sources import ParameterSource

    register()
    meeting = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 1 + workers}
    match backend:
        case "slipstream_ipc":
            from deployments.weights.transports.ipc import IpcTrainerInitInfo

            info: Any = IpcTrainerInitInfo(rank=0, world_size=1 + workers, **options)
        case "slipstream_nccl":
            from deployments.weights.transports.nccl import NcclTrainerInitInfo

            info = NcclTrainerInitInfo(rank=0, **meeting, **options)
        case "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=0, **options)
        case "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(rank=0, **meeting, **{"packed_num_buffers": 1, **options})
        case _:
            raise ValueError(f"no such backend: {backend!r}")
    source = PublishSource(ParameterSource(model, dtype=torch.bfloat16), keep_copy=False)
    source.begin()
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
