"""Added to vLLM's worker: staging, calls beside the engine's own (`worker_calls`), and adapters. A thread
reads an adapter's files during decoding; `add_lora`, between two steps, takes the result."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from vllm.lora.request import LoRARequest

from deployments.replica.worker_calls import answer_calls, open_connection
from deployments.weights.staging.staging_extension import StagingWorkerExtension

_READ = "_slipstream_reads"


class WorkerExtension(StagingWorkerExtension):
    """Run between two steps, or on their own thread (`worker_calls`)."""

    def answer_calls_at(self, path: str) -> bool:
        try:
            connection = open_connection(Path(path))
        except OSError:
            return False
        if (manager := getattr(self.model_runner, "lora_manager", None)) is not None:
            _reads(manager)  # replace vLLM's loader on its own thread
        methods = (
            self.staging_progress,
            self.staging_store_state,
            self.adapter_read,
            self.adapter_is_read,
            self.adapter_forget,
        )
        by_name = {method.__name__: method for method in methods}
        Thread(target=answer_calls, args=(connection, by_name), name="worker-calls", daemon=True).start()
        return True

    def adapter_read(self, adapter_id: int, path: str, is_3d: bool) -> None:
        manager = self.model_runner.lora_manager
        request = LoRARequest(lora_name=path, lora_int_id=adapter_id, lora_path=path, is_3d_lora_weight=is_3d)
        read = _reads(manager)[adapter_id] = Future()
        load = type(manager)._load_adapter
        Thread(target=_read, args=(read, partial(load, manager, request)), daemon=True).start()

    def adapter_is_read(self, adapter_id: int) -> bool:
        """Whether `add_lora` of this id will find it read; raises vLLM's error about the files."""
        read = _reads(self.model_runner.lora_manager).get(adapter_id)
        return read is not None and read.done() and read.result() is not None

    def adapter_forget(self, adapter_id: int) -> None:
        _reads(self.model_runner.lora_manager).pop(adapter_id, None)


def _reads(manager: Any) -> dict[int, "Future[Any]"]:
    if _READ not in manager.__dict__:
        setattr(manager, _READ, {})
        manager._load_adapter = partial(_load_adapter, manager, manager._load_adapter)
    return getattr(manager, _READ)


def _read(read: "Future[Any]", load: Any) -> None:
    try:
        read.set_result(load())
    except Exception as error:  # `adapter_is_read` raises it
        read.set_exception(error)


def _load_adapter(manager: Any, load: Any, request: LoRARequest) -> Any:
    """Replaces vLLM's: takes what was read ahead, once; else reads the files, as after an eviction."""
    read = _reads(manager).pop(request.lora_int_id, None)
    return load(request) if read is None else read.result()
