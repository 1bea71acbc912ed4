import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forked import call
from tests.trainers import tiny
from tests.trainers.vllm_eagle3 import drafted
from trainers.eagle3 import read_head, write_new_head
from trainers.settings import DrafterConfig
from trainers.trained_policy import TrainedPolicy

TOKENS = [3, 7, 11, 5, 30, 2, 19, 8, 8, 21]


def directories(tmp_path: Path, *, draft_vocabulary: int | None = None, layers: int = 5) -> tuple[Path, Path]:
    """A model of its own hidden states in each layer, and a head whose every tensor matters."""
    model, head = tmp_path / "model", tmp_path / "head"
    tiny.model("llama", num_hidden_layers=layers, head_dim=32).save_pretrained(model)
    made = write_new_head(model, head, draft_vocabulary=draft_vocabulary)
    tensors = load_file(head / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in made.named_parameters():
        tensors[name] = parameter.detach() + 0.3 * torch.randn(parameter.shape, generator=generator)
    save_file(tensors, head / "model.safetensors")
    return model, head


def own_logits(model: Path, head: Path) -> torch.Tensor:
    """By the way of a training step: logits of tokens 2, 3, ... in the head's vocabulary."""
    policy = TrainedPolicy.load(model)
    drafter = policy.attach_drafter(DrafterConfig(model=str(head)))
    batch = tiny.batch(TOKENS)
    made: list[torch.Tensor] = []
    drafter.head.lm_head.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    policy.scores(batch)
    drafter.loss(batch, 1, counts=True)
    return made[0].detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["whole", "part", "default-layers", "nested-layers", "two-layers", "normed-residual"]
)
def test_the_head_drafts_as_vllms_module(tmp_path: Path, kind: str) -> None:
    model, head = directories(
        tmp_path, draft_vocabulary=20 if kind == "part" else None, layers=2 if kind == "two-layers" else 8
    )
    config = json.loads((head / "config.json").read_text())
    if kind == "default-layers":
        del config["eagle_aux_hidden_state_layer_ids"]
    if kind == "nested-layers":
        ids = "eagle_aux_hidden_state_layer_ids"
        config["eagle_config"] = {ids: [*config.pop(ids)[:2], 8]}
    config["norm_before_residual"] = kind == "normed-residual"
    (head / "config.json").write_text(json.dumps(config))
    theirs = torch.from_numpy(call(drafted, model, head, tmp_path / "rendezvous", TOKENS))
    own, ids = own_logits(model, head), read_head(head).token_ids()
    assert own.shape == (8, 20 if kind == "part" else 40)
    torch.testing.assert_close(own, theirs[:8, ids], rtol=1e-4, atol=1e-4)
    assert torch.isinf(theirs).any() == (kind == "part")
