"""The trainer of the GPU benchmarks: a model in a process of its own, whose weight-sync client calls a link.

The links are in `benchmarks.weight_sync`.
"""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

TIMEOUT_S = 120.0


class TrainerProcess:
    """A model on one GPU in a process of its own; the calls of its weight-sync client go to a `link`.

    Args:
        gpu: the trainer's GPU, counted over all of the machine.
        dtype: of its parameters; they are sent in bfloat16.
        drafter: a random EAGLE-3 head is sent with them.
    """

    def __init__(
        self,
        size: str,
        seed: int,
        *,
        gpu: int,
        tied: bool = False,
        dtype: str = "bfloat16",
        drafter: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_train, args=(theirs, size, seed, gpu, tied, dtype, drafter), daemon=True
        )
        self._process.start()
        self.size_bytes = int(self._pipe.recv())

    async def connect(
        self,
        link: Any,
        backend: str,
        workers: int,
        *,
        chunk_bytes: int | None = None,
        wire: dict[str, Any] | None = None,
    ) -> float:
        """Make a transfer engine for `backend`; seconds.

        Args:
            chunk_bytes: None: the backend's default.
            wire: fields of vLLM's own init info, over what the registry chooses.
        """
        return float(await self._command(link, ("connect", backend, workers, chunk_bytes, wire or {})))

    async def send(self, link: Any, seed: int | None = None, *, changed: float = 0.0) -> float:
        """One round; seconds, measured by the trainer.

        Args:
            seed: of other weights.
            changed: move this share of the numbers, in bfloat16, to neighbouring ones.
        """
        return float(await self._command(link, ("send", seed, changed)))

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
                except Exception as error:  # sent to the trainer, whose engine raises it
                    self._pipe.send(f"{type(error).__name__}: {error}")
            elif kind == "done":
                loop.call_soon_threadsafe(done.set_result, rest[0])
                return
            else:
                loop.call_soon_threadsafe(done.set_exception, RuntimeError(rest[0]))
                return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _PipeClient:
    """vLLM's weight-sync client over a pipe to the benchmark's process."""

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


def _train(pipe: Any, size: str, seed: int, gpu: int, tied: bool, dtype: str, drafter: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    import torch

    from benchmarks.models import head_config, random_model
    from trainers.eagle3 import Eagle3Head
    from trainers.sources import DRAFTER

    torch.cuda.set_device(0)
    model = random_model(size, seed, "cuda", tied=tied, dtype=dtype)
    head: dict[str, torch.Tensor] = {}
    if drafter:
        made = Eagle3Head(head_config(size), has_d2t=True).to("cuda", torch.bfloat16).state_dict()
        # vLLM's dummy weights are equal wherever shapes are: its head takes the policy's output layer.
        head = {DRAFTER + name: tensor for name, tensor in made.items() if name != "lm_head.weight"}
    sent = [*model.parameters(), *head.values()]
    pipe.send(sum(each.numel() * torch.bfloat16.itemsize for each in sent))
    engine: Any = None
    while True:
        command, *rest = pipe.recv()
        start = time.perf_counter()
        try:
            if command == "connect":
                if engine is not None:
                    engine.shutdown()
                engine = _trainer_engine(_PipeClient(pipe), model, head, *rest)
            else:
                if rest[0] is not None:
                    new = random_model(size, rest[0], "cuda", tied=tied, dtype=dtype)
                    with torch.no_grad():
                        for old, other in zip(model.parameters(), new.parameters(), strict=True):
                            old.copy_(other)
                    del new
                for each in model.parameters() if rest[1] else ():
                    each.data.view(torch.int16).bitwise_xor_(torch.rand(each.shape, device="cuda") < rest[1])
                torch.cuda.synchronize()
                start = time.perf_counter()
                engine.send_weights()
            pipe.send(("done", time.perf_counter() - start))
        except Exception as error:  # the benchmark's process raises it
            import traceback

            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _trainer_engine(
    client: Any,
    model: Any,
    head: Any,
    backend: str,
    workers: int,
    chunk_bytes: int | None,
    wire: dict[str, Any],
) -> Any:
    from dataclasses import replace

    import torch
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from deployments.trainer.weight_publisher import PublishSource
    from deployments.vllm_plugin import register
    from deployments.weights.transports.registry import TrainerFacts, trainer_init_info
    from trainers.sources import ParameterSource

    register()
    facts = TrainerFacts(
        rank=0, workers=workers, master_address="127.0.0.1", master_port=free_port(), chunk_bytes=chunk_bytes
    )
    parameters = ParameterSource(model, dtype=torch.bfloat16, drafter=head or None)
    source = PublishSource(parameters, keep_copy=False)
    source.begin()
    info: Any = trainer_init_info(backend, facts)
    return WeightTransferTrainerFactory.trainer_init(replace(info, **wire), client=client, source=source)
