"""The names of what can be reached from a model, and what counts as a number."""

import numpy as np
import torch

from deployments.weights.staging.model_state.reachable import path_name, reachable


def test_numpy_numbers_are_found() -> None:
    model = torch.nn.Module()
    model.scale = np.float32(0.5)  # type: ignore[assignment]
    assert "scale" in map(path_name, reachable(model).numbers)
