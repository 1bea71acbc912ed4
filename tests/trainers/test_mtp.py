import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forked import call
from tests.tiny_models import save_tiny_llama, save_tiny_vision_language
from tests.trainers import tiny
from tests.trainers.vllm_mtp import drafted
from trainers.learner import Learner
from trainers.settings import DrafterConfig, LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

TOKENS = [3, 7, 11, 5, 30, 2, 19, 8, 8, 21]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_vision_language(tmp_path / "model", 0)


@pytest.mark.slow
def test_the_head_drafts_as_vllms_module(model: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy.load(model)
    drafter = policy.attach_drafter(DrafterConfig())
    batch = tiny.batch(TOKENS)
    made: list[torch.Tensor] = []
    drafter.head.norm.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    drafter.begin()
    policy.scores(batch)
    drafter.loss(batch, 1, counts=True)
    output = policy.model.get_output_embeddings().weight
    own = (made[0][0, 2:] @ output.T).detach()  # of tokens 2, 3, ...
    with torch.no_grad():
        hidden = policy.model.base_model(torch.tensor([TOKENS])).last_hidden_state[0]
    theirs = torch.from_numpy(call(drafted, model, tmp_path, TOKENS, hidden.numpy()))
    torch.testing.assert_close(own, theirs[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_head_learns_and_the_policy_learns_bit_for_bit_as_without_it(model: Path) -> None:
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-4))
    batch = [tiny.trajectory((3, 4), (5, 6, 7, 8, 9, 1)), tiny.trajectory((3, 4), (7, 1), advantage=-1.0)]
    policy, alone = TrainedPolicy.load(model), TrainedPolicy.load(model)
    policy.attach_drafter(DrafterConfig(learning_rate=1e-2))
    learners = Learner(policy, config), Learner(alone, config)
    metrics = [[learner.step(batch) for learner in learners] for _ in range(12)]
    assert metrics[-1][0]["drafter_loss"] < 0.5 * metrics[0][0]["drafter_loss"]
    for mine, theirs in metrics:
        assert {name: mine[name] for name in theirs} | {"step_s": 0} == {**theirs, "step_s": 0}
    trained = policy.trained()
    assert all(torch.equal(trained[name], tensor) for name, tensor in alone.trained().items())
    assert len(trained) - len(alone.trained()) == 15


@pytest.mark.slow
def test_a_model_without_a_head_that_is_trained_here_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "llama", 0)
    with pytest.raises(ValueError, match=r"expected a dense Qwen3.5 with one layer .*, got 'llama' with 1$"):
        TrainedPolicy.load(other).attach_drafter(DrafterConfig())
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    policy = TrainedPolicy.load(model)
    with pytest.raises(ValueError, match=r"the drafter's 'norm.weight': expected shape \[128\], got none$"):
        policy.attach_drafter(DrafterConfig())
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"got 'qwen3_5_text' with 2$"):
        TrainedPolicy.load(model).attach_drafter(DrafterConfig())
