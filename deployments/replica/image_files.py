"""The image files of rollouts' requests: a trainer reads them as the engine has.

Engine calls have patches of an image, or only its hash if the engine has seen it. vLLM hashes the file
before, in this process: here it is kept for the call.
"""

import sys
from collections import OrderedDict
from threading import Lock
from typing import Any

MAX_BYTES = 1 << 28


class ImageFiles:
    """The newest files, by vLLM's hashes. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self._bytes, self._max_bytes = 0, max_bytes

    def put(self, key: str, content: bytes) -> None:
        with self._lock:
            self._bytes += len(content) - len(self._files.pop(key, b""))
            self._files[key] = content
            while self._bytes > self._max_bytes and len(self._files) > 1:
                self._bytes -= len(self._files.popitem(last=False)[1])

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._files.get(key)


FILES = ImageFiles()


def install() -> None:
    """Keeps files from the first captured request on: without rollouts, none."""
    module: Any = sys.modules.get("vllm.multimodal.hasher")
    if module is None or getattr(module.MultiModalHasher, "slipstream_files", None) is not None:
        return
    hasher = module.MultiModalHasher
    theirs = hasher.hash_kwargs

    def hash_kwargs(algorithm: Any, /, **values: Any) -> str:
        found: str = theirs(algorithm, **values)
        if (content := getattr(values.get("image"), "original_bytes", None)) is not None:
            FILES.put(found, content)
        return found

    hasher.hash_kwargs = staticmethod(hash_kwargs)
    hasher.slipstream_files = FILES
