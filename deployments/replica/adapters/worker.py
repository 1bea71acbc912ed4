"""What a replica can call in a vLLM worker for adapters: their files are read while the engine decodes.

vLLM's `add_lora` reads the files on the engine's thread, between two steps: a tenth of a second or more in
which nothing decodes. Here a thread reads them before, with vLLM's own loader, and `add_lora` finds them
read.
"""

from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

from vllm.lora.request import LoRARequest

from deployments.weights.staging.worker_extension import StagingWorkerExtension

_READ = "_read_by_the_fleet"  # an attribute of vLLM's LoRA manager: id -> Future of its LoRAModel


class WorkerExtension(StagingWorkerExtension):
    """All methods that are added to vLLM's worker. Called on the engine's thread, between two steps."""

    def adapter_read(self, name: str, adapter_id: int, path: str, is_3d: bool) -> None:
        """Begin to read an adapter's files; `adapter_is_read` says how far that is."""
        manager = self.model_runner.lora_manager
        if _READ not in manager.__dict__:
            setattr(manager, _READ, {})
            manager._load_adapter = partial(_load_adapter, manager, manager._load_adapter)
        request = LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=path, is_3d_lora_weight=is_3d)
        read: Future[Any] = Future()
        getattr(manager, _READ)[adapter_id] = read
        load = type(manager)._load_adapter
        Thread(target=_read, args=(read, partial(load, manager, request)), daemon=True).start()

    def adapter_is_read(self, adapter_id: int) -> bool:
        """Whether `add_lora` would find it read.

        Raises:
            Exception: vLLM's, about the files.
        """
        read: Future[Any] = getattr(self.model_runner.lora_manager, _READ)[adapter_id]
        if read.done():
            read.result()
        return read.done()

    def adapter_forget(self, adapter_id: int) -> None:
        """What was read and not added is not needed any more."""
        getattr(self.model_runner.lora_manager, _READ, {}).pop(adapter_id, None)


def _read(read: "Future[Any]", load: Any) -> None:
    try:
        read.set_result(load())
    except Exception as error:  # `adapter_is_read` raises it
        read.set_exception(error)


def _load_adapter(manager: Any, load: Any, request: LoRARequest) -> Any:
    """In place of vLLM's: what is read already, once; else from the files, as after an eviction."""
    read: Future[Any] | None = getattr(manager, _READ).pop(request.lora_int_id, None)
    return load(request) if read is None else read.result()
