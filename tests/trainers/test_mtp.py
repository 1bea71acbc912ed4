import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forked import call
from tests.tiny_models import save_tiny_llama, save_tiny_mtp, save_tiny_vision_language
from tests.trainers import tiny
from tests.trainers.test_drafter import copies
from tests.trainers.vllm_mtp import drafted
from trainers.learner import Learner
from trainers.settings import DrafterConfig, LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
TOKENS = [3, 7, 11, 5, 30, 2, 19, 8, 8, 21]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_vision_language(tmp_path / "model", 0)


def fuse_experts(file: Path) -> None:
    """As Qwen3.5's checkpoints have them: all of a layer's in two tensors."""
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts.0.gate_proj." in name]:
        prefix = name.partition("0.gate_proj.")[0]
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fused"), [*((family, False) for family in FAMILIES), ("qwen3_5_moe_text", True)]
)
def test_the_head_drafts_as_vllms_module(family: str, fused: bool, tmp_path: Path) -> None:
    """Which loads it from what is published."""
    model = save_tiny_mtp(tmp_path / "model", 0, family)
    if fused:
        fuse_experts(model / "model.safetensors")
    policy = TrainedPolicy.load(model)
    drafter = policy.attach_drafter(DrafterConfig())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += torch.randn_like(parameter) * 0.02
    file = model / "model.safetensors"
    stored, published = load_file(file), copies(drafter.tensors())
    assert all(tensor.shape == stored[name].shape for name, tensor in published.items())
    save_file(stored | published, file, metadata={"format": "pt"})
    batch = tiny.batch(TOKENS)
    made: list[torch.Tensor] = []
    drafter.head.norm.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    drafter.begin()
    policy.scores(batch)
    drafter.loss(batch, 1, counts=True)
    output = policy.model.get_output_embeddings().weight
    own = (made[0][0, 1:] @ output.T).detach()
    with torch.no_grad():
        hidden = policy.model.base_model(torch.tensor([TOKENS])).last_hidden_state[0]
    theirs = torch.from_numpy(call(drafted, model, tmp_path, TOKENS, hidden.numpy()))
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_the_head_learns_and_the_policy_learns_bit_for_bit_as_without_it(family: str, tmp_path: Path) -> None:
    model = save_tiny_mtp(tmp_path, 0, family)
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-4))
    batch = [tiny.trajectory((3, 4), (5, 6, 7, 8, 9, 1)), tiny.trajectory((3, 4), (7, 1), advantage=-1.0)]
    policy, alone = TrainedPolicy.load(model), TrainedPolicy.load(model)
    drafter = policy.attach_drafter(DrafterConfig(learning_rate=1e-2))
    learners = Learner(policy, config), Learner(alone, config)
    metrics = [[learner.step(batch) for learner in learners] for _ in range(12)]
    assert metrics[-1][0]["drafter_loss"] < 0.5 * metrics[0][0]["drafter_loss"]
    for mine, theirs in metrics:
        assert {name: mine[name] for name in theirs} | {"step_s": 0} == {**theirs, "step_s": 0}
    trained = policy.trained()
    assert all(torch.equal(trained[name], tensor) for name, tensor in alone.trained().items())
    assert trained.keys() - alone.trained().keys() == drafter.state().keys()


@pytest.mark.slow
def test_a_model_without_a_head_that_is_trained_here_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "llama", 0)
    with pytest.raises(ValueError, match=r"expected one layer of .*, glm4_moe_lite, got 1 of 'llama'$"):
        TrainedPolicy.load(other).attach_drafter(DrafterConfig())
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    policy = TrainedPolicy.load(model)
    with pytest.raises(
        ValueError, match=r"the drafter's 'mtp.norm.weight': expected shape \[128\], got none$"
    ):
        policy.attach_drafter(DrafterConfig())
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"got 2 of 'qwen3_5_text'$"):
        TrainedPolicy.load(model).attach_drafter(DrafterConfig())
