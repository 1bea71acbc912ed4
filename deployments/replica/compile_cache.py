"""A successor finds what its predecessor compiled.

vLLM keys its compile cache and its startup plan by the path and the revision of the checkpoint, beside the
configuration that it read there. A replica that starts from a stored version has another path after each
round, and would compile again. Neither changes the graph; vLLM hashes the source files that it traced, too.
"""

import copy
import functools

_PLACES = ("model", "model_weights", "revision")


def install() -> None:
    from vllm.config import ModelConfig

    by_path = ModelConfig.compute_hash
    if hasattr(by_path, "__wrapped__"):
        return

    @functools.wraps(by_path)
    def compute_hash(config: ModelConfig) -> str:
        placeless = copy.copy(config)
        for name in _PLACES:
            setattr(placeless, name, "")
        return by_path(placeless)

    ModelConfig.compute_hash = compute_hash
