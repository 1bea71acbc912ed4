"""The replica's half of every transport: receive while generating, check, swap between two steps.

    start_weight_update     a session begins; live weights are not touched
    update_weights          returns at once; a thread receives one payload into the staging
    progress / verify       asked for by the follower, through the worker extension
    finish_weight_update    the swap, inside a pause of the scheduler
    drop                    forgets the session; the live weights were never touched

vLLM calls the first, second and fourth itself (`WeightTransferEngine`); a transport adds only how
a payload becomes chunks of bytes (`receive`).
"""

import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.digest import combined, digests
from deployments.weights.manifest import checkpoint_manifest, mismatches, sentence
from deployments.weights.packing import Chunk, unpack
from deployments.weights.protocol import Outcome

Tensors = list[tuple[str, torch.Tensor]]
Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class Staging(Protocol):
    """Where a version waits until the fleet has decided."""

    def begin(self) -> None: ...

    def add(self, tensors: Tensors) -> None:
        """Take tensors by Hugging Face name. Called on the staging thread, while the engine decodes."""

    def swap(self) -> None:
        """Make the staged version the live one. Called with the scheduler paused."""

    def drop(self) -> None: ...


class HostStaging:
    """The tensors wait in host memory and are loaded inside the pause."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._tensors = {}

    def add(self, tensors: Tensors) -> None:
        self._tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def swap(self) -> None:
        # On a CPU, linear weights are repacked after loading: only the layerwise reload, which runs
        # that step again, changes what the model computes.
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self._model)
        self._model.load_weights(self._tensors.items())  # type: ignore[operator]
        finalize_layerwise_reload(self._model, self._model_config)
        self.drop()

    def drop(self) -> None:
        self._tensors = {}


@dataclass
class Session:
    """What one round has brought to this worker so far."""

    offered: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    payloads_done: int = 0
    size_bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    outcome: Outcome = Outcome.DONE
    message: str = ""

    def state(self) -> dict[str, Any]:
        return {
            "payloads_done": self.payloads_done,
            "bytes": self.size_bytes,
            "stage_s": self.stage_s,
            "verify_s": self.verify_s,
            "outcome": self.outcome.value,
            "message": self.message,
        }


class StagedWeightTransferEngine(WeightTransferEngine[Init, Update], Generic[Init, Update]):
    """Base of the four transports on the replica's side."""

    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging = self._make_staging(vllm_config, model)
        self._expected = checkpoint_manifest(Path(vllm_config.model_config.model))
        self._session: Session | None = None
        self._connecting: Future[None] = Future()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")

    def _make_staging(self, vllm_config: VllmConfig, model: torch.nn.Module) -> Staging:
        mode = vllm_config.additional_config.get("staging", "host")
        if mode == "device":
            from deployments.weights.device_staging import DeviceStaging

            return DeviceStaging(vllm_config, self.device, model)
        return HostStaging(model, vllm_config.model_config)

    @abstractmethod
    def connect(self, init_info: Init) -> None:
        """Join the transfer group. Runs on the staging thread and may wait for peers."""

    @abstractmethod
    def receive(self, update_info: Update) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The chunks of one payload and their bytes (uint8), each valid until the next is asked for."""

    def init_transfer_engine(self, init_info: Init) -> None:
        # A rendezvous waits for the other members: on the engine's own thread it would stop decoding.
        self._connecting = self._thread.submit(self.connect, init_info)

    def connected(self) -> dict[str, Any]:
        """Whether the last `init_transfer_engine` is through, and how it ended."""
        error = self._connecting.exception() if self._connecting.done() else None
        outcome = Outcome.DONE if error is None else Outcome.FAILED
        return {"done": self._connecting.done(), "outcome": outcome.value, "message": str(error or "")}

    def receive_weights(self, update_info: Update) -> None:
        raise AssertionError("payloads are staged by update_weights, never loaded directly")

    def start_weight_update(self) -> None:
        self._session = Session()
        self.staging.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # torch.accelerator.synchronize() of the base class raises where there is no accelerator,
        # and would wait for the staging where there is one.
        assert self._session is not None
        self._thread.submit(self._stage, self._session, update_info)

    def finish_weight_update(self) -> None:
        assert self._session is not None
        with torch.inference_mode():
            self.staging.swap()
        self._session = None

    def progress(self) -> dict[str, Any]:
        """How far the session's payloads are; see `Session.state`."""
        assert self._session is not None
        return self._session.state()

    def verify(self) -> dict[str, Any]:
        """Whether the staged version is complete and fits the model; `digest` names its content."""
        session = self._session
        assert session is not None
        if session.outcome is Outcome.DONE and self._expected is not None:
            missing = mismatches(self._expected.tensors, session.offered, complete=True)
            if missing:
                session.outcome, session.message = Outcome.REJECTED, sentence(missing)
        return session.state() | {"digest": combined(session.digests)}

    def drop(self) -> None:
        """Forget the session. A payload that is still arriving ends by itself or is cut off by `abort`."""
        self._session = None
        self.abort()
        self._thread.submit(self.staging.drop).result()

    def abort(self) -> None:  # noqa: B027 - a transport without a blocking peer has nothing to break
        """Break a transfer that waits for a peer."""

    def shutdown(self) -> None:
        self.abort()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")

    def _stage(self, session: Session, update_info: dict[str, Any]) -> None:
        start = time.perf_counter()
        try:
            if session is self._session and session.outcome is Outcome.DONE:
                for chunk, block in self.receive(self.parse_update_info(update_info)):
                    self._accept(session, chunk, block)
        except ValueError as error:  # what a transport or the manifest says of a wrong payload
            session.outcome, session.message = Outcome.REJECTED, str(error)
        except Exception as error:  # a thread's last word: the follower reports it and the fleet decides
            session.outcome, session.message = Outcome.FAILED, f"{type(error).__name__}: {error}"
        finally:
            session.stage_s += time.perf_counter() - start
            session.payloads_done += 1

    def _accept(self, session: Session, chunk: Chunk, block: torch.Tensor) -> None:
        offered = {entry.name: (entry.dtype, entry.shape) for entry in chunk.entries}
        if self._expected is not None:
            problems = mismatches(self._expected.tensors, offered, complete=False)
            if problems:
                raise ValueError(sentence(problems))
        tensors, sent = unpack(chunk, block)
        start = time.perf_counter()
        found = digests([tensor for _, tensor in tensors])
        check(tensors, sent, found)
        session.verify_s += time.perf_counter() - start
        self.staging.add(tensors)
        session.offered |= offered
        session.digests |= {name: value for (name, _), value in zip(tensors, found, strict=True)}
        session.size_bytes += chunk.size_bytes


def check(tensors: Tensors, sent: list[int], found: list[int]) -> None:
    """Compare digests, and refuse numbers that no optimizer means to publish.

    Raises:
        ValueError: names the tensors whose digest differs or that hold NaN or infinity.
    """
    torn = [
        f"{name!r} was sent with digest {a:016x} and arrived with {b:016x}"
        for (name, _), a, b in zip(tensors, sent, found, strict=True)
        if a != b
    ]
    if torn:
        raise ValueError(sentence(torn))
    # A sum is not finite if and only if a term is not (float32 holds the sum of any real model's
    # weights), and it reads the tensor once without a mask of its size.
    sums = [t.sum(dtype=torch.float32) for _, t in tensors if t.is_floating_point()]
    if sums and not bool(torch.stack(sums).isfinite().all()):
        bad = [
            f"{name!r} holds NaN or infinity"
            for name, tensor in tensors
            if tensor.is_floating_point() and not bool(tensor.sum(dtype=torch.float32).isfinite())
        ]
        raise ValueError(sentence(bad))
