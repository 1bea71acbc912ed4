"""The names under which requests find adapters, and which versions requests use."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vllm.lora.request import LoRARequest

from deployments.protocol.adapters import Adapter
from deployments.replica.spans import RECORDER


class Uses:
    """How many requests use which adapter, by id.

    Args:
        unused: called when the last request that used one has ended.
    """

    def __init__(self, unused: Callable[[int], None]) -> None:
        self._counts: Counter[int] = Counter()
        self._unused = unused

    def __getitem__(self, adapter_id: int) -> int:
        return self._counts[adapter_id]

    def begin(self, adapter_id: int) -> None:
        self._counts[adapter_id] += 1

    def end(self, adapter_id: int) -> None:
        self._counts[adapter_id] -= 1
        if not self._counts[adapter_id]:
            del self._counts[adapter_id]
            self._unused(adapter_id)

    @contextmanager
    def using(self, adapter_id: int) -> Iterator[None]:
        self.begin(adapter_id)
        try:
            yield
        finally:
            self.end(adapter_id)


class NamedAdapters(dict[str, LoRARequest]):
    """What vLLM's routes look a request's `model` up in, in place of a plain dictionary.

    The keys are what `/v1/models` lists: each live version by its full name, and each name. A look-up of a
    name returns its newest version, so the engine hears full names alone; and it counts as a use until the
    HTTP request ends, from the same moment on: no version goes between its look-up and its first token.
    """

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses
        self._newest: dict[str, LoRARequest] = {}

    def make_live(self, live: Sequence[Adapter]) -> None:
        """These, oldest first, and no others."""
        self.clear()
        self._newest = {}
        for adapter in live:
            request = lora_request(adapter)
            super().__setitem__(adapter.full_name, request)
            self._newest[adapter.full_name] = self._newest[adapter.name] = request
        for adapter in live:  # the newest is the last
            super().__setitem__(adapter.name, lora_request(adapter, name=adapter.name))

    def __getitem__(self, name: str) -> LoRARequest:
        recorder = RECORDER.get()
        if recorder is None:
            return self._newest[name]
        if name not in recorder.looked_up:  # all parts of a request have the same version
            found = recorder.looked_up[name] = self._newest[name]
            recorder.adapter = found.lora_name
            self._uses.begin(found.lora_int_id)
            recorder.at_end(lambda: self._uses.end(found.lora_int_id))
        looked_up: LoRARequest = recorder.looked_up[name]
        return looked_up


def lora_request(adapter: Adapter, name: str | None = None) -> LoRARequest:
    """vLLM's request for a version. It never loads in place: what is loaded under an id stays."""
    return LoRARequest(
        lora_name=adapter.full_name if name is None else name,
        lora_int_id=adapter.adapter_id,
        lora_path=adapter.path,
        is_3d_lora_weight=adapter.is_3d,
    )
