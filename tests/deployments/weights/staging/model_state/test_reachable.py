"""The names of what can be reached from a model, and what counts as a number."""

from types import SimpleNamespace

import numpy as np
import torch

from deployments.weights.staging.model_state.reachable import path_name, reachable


def test_path_names_are_python_expressions() -> None:
    model = torch.nn.Module()
    model.config = {"w": [(torch.ones(2),)], ("a", 1): torch.ones(3)}  # type: ignore[assignment]
    model.layer = SimpleNamespace(scale=torch.ones(1))  # type: ignore[assignment]
    assert sorted(map(path_name, reachable(model).tensors)) == [
        "config['w'][0][0]",
        "config[('a', 1)]",
        "layer.scale",
    ]


def test_numpy_numbers_are_found() -> None:
    model = torch.nn.Module()
    model.scale = np.float32(0.5)  # type: ignore[assignment]
    assert "scale" in map(path_name, reachable(model).numbers)
