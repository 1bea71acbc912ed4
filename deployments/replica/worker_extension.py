"""vLLM worker methods for adapters: a thread reads their files while the engine decodes, and `add_lora`,
which runs between two steps, takes the result."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from vllm.lora.request import LoRARequest

from deployments.replica.adapters.worker_calls import answer_calls, open_connection
from deployments.weights.staging.staging_extension import StagingWorkerExtension

_READ = "_slipstream_reads"  # set on vLLM's LoRA manager


class WorkerExtension(StagingWorkerExtension):
    """Methods added to vLLM's worker. They run between two steps, or on a thread of their own
    (`worker_calls`)."""

    def adapter_answer_at(self, path: str) -> bool:
        try:
            connection = open_connection(Path(path))
        except OSError:
            return False
        _reads(self.model_runner.lora_manager)  # replace vLLM's loader on its own thread
        methods = (
            self.staging_receive_files,
            self.adapter_read,
            self.adapter_is_read,
            self.adapter_forget,
        )
        by_name = {method.__name__: method for method in methods}
        Thread(target=answer_calls, args=(connection, by_name), name="adapter-calls", daemon=True).start()
        return True

    def adapter_read(self, key: str, path: str, is_3d: bool) -> None:
        manager = self.model_runner.lora_manager
        request = LoRARequest(lora_name=key, lora_int_id=1, lora_path=path, is_3d_lora_weight=is_3d)
        read: Future[Any] = Future()
        _reads(manager)[key] = read
        load = type(manager)._load_adapter
        Thread(target=_read, args=(read, partial(load, manager, request)), daemon=True).start()

    def adapter_is_read(self, key: str, adapter_id: int) -> bool:
        """Whether `add_lora` of this id will find it read; raises vLLM's error about the files."""
        reads = _reads(self.model_runner.lora_manager)
        if key in reads and reads[key].done():
            reads[key].result()
            reads[adapter_id] = reads.pop(key)
        return adapter_id in reads

    def adapter_forget(self, key: str, adapter_id: int) -> None:
        reads = _reads(self.model_runner.lora_manager)
        reads.pop(key, None)
        reads.pop(adapter_id, None)


def _reads(manager: Any) -> dict[str | int, "Future[Any]"]:
    """Futures of vLLM's LoRAModel: by the reader's key, then by adapter id for `add_lora`."""
    if _READ not in manager.__dict__:
        setattr(manager, _READ, {})
        manager._load_adapter = partial(_load_adapter, manager, manager._load_adapter)
    reads: dict[str | int, Future[Any]] = getattr(manager, _READ)
    return reads


def _read(read: "Future[Any]", load: Any) -> None:
    try:
        read.set_result(load())
    except Exception as error:  # `adapter_is_read` raises it
        read.set_exception(error)


def _load_adapter(manager: Any, load: Any, request: LoRARequest) -> Any:
    """Replaces vLLM's: takes what was read ahead, once; else reads the files, as after an eviction."""
    read = _reads(manager).pop(request.lora_int_id, None)
    if read is None:
        return load(request)
    lora = read.result()
    lora.id = request.lora_int_id  # unknown when the read started
    return lora
