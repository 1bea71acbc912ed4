import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.trainers import tiny
from tests.trainers.test_packed_lines import blocks, packed
from trainers.batching import TokenBatch, collate
from trainers.drafter import TrainedDrafter
from trainers.eagle3 import read_head, write_new_head
from trainers.learner import Learner
from trainers.packed_lines import only_keys
from trainers.settings import DrafterConfig, LearnerConfig, LoraConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_microbatch=12, updates_per_step=2
)
CPU = torch.device("cpu")


def drafting(directory: Path, *, learning_rate: float = 1e-2, **options: Any) -> TrainedPolicy:
    """A policy with a head, both in directories below."""
    if not directory.joinpath("head").exists():
        tiny.policy(directory / "model")
        write_new_head(directory / "model", directory / "head")
    policy = TrainedPolicy.load(directory / "model", **options)
    policy.attach_drafter(DrafterConfig(model=str(directory / "head"), learning_rate=learning_rate))
    return policy


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        pytest.param({"compute_dtype": "bfloat16"}, marks=pytest.mark.long),
        {"dtype": "bfloat16"},
        {"lora": LoraConfig(publish="merged", rank=2)},
    ],
    ids=["plain", "checkpointing", "mixed", "bfloat16", "lora"],
)
def test_the_policy_learns_bit_for_bit_as_without_a_drafter(tmp_path: Path, options: dict[str, Any]) -> None:
    lora = options.pop("lora", None)
    with_drafter, without = drafting(tmp_path, **options), TrainedPolicy.load(tmp_path / "model", **options)
    for policy in (with_drafter, without):
        if lora is not None:
            policy.adapt(lora, seed=0)
    drafter = with_drafter.drafter
    assert drafter is not None
    before = copies(drafter.tensors())
    learners = Learner(with_drafter, CONFIG), Learner(without, CONFIG)
    for _ in range(2):
        mine, theirs = (learner.step(tiny.BATCH) for learner in learners)
        assert {**mine, "step_s": 0} == {**theirs, "step_s": 0} | {
            name: mine[name] for name in ("drafter_loss", "drafter_agreement", "drafter_grad_norm")
        }
    own = {name: tensor for name, tensor in with_drafter.trained().items() if not name.startswith("drafter.")}
    assert own.keys() == without.trained().keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in without.trained().items())
    unchanged = [name for name, tensor in drafter.tensors().items() if torch.equal(tensor, before[name])]
    assert not unchanged


@pytest.mark.slow
def test_the_loss_falls_and_more_tokens_agree(tmp_path: Path) -> None:
    learner = Learner(drafting(tmp_path), LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-6)))
    metrics = [learner.step(tiny.BATCH) for _ in range(40)]
    first, last = metrics[0], metrics[-1]
    assert last["drafter_loss"] < 0.3 * first["drafter_loss"]
    assert last["drafter_agreement"] > max(0.8, first["drafter_agreement"])


def loss(policy: TrainedPolicy, batch: TokenBatch, total: int) -> float:
    drafter = policy.drafter
    assert drafter is not None
    policy.scores(batch)
    return float(drafter.loss(batch, total, counts=True).detach())


def laid_out(rows: list[tuple[int, ...]], trajectories: list[Any] = tiny.BATCH) -> TokenBatch:
    return collate(trajectories, rows, pad_token_id=0, device=CPU)


def in_a_line(rows: list[tuple[int, ...]]) -> TokenBatch:
    """Packed, with the mask in a form that has a backward pass on CPUs."""
    batch = packed(tiny.BATCH, rows)
    mask, length = batch.attention_mask, batch.input_ids.shape[1]
    assert isinstance(mask, BlockMask)
    return replace(batch, attention_mask=create_mask(mask.mask_mod, 1, 1, length, length, device="cpu"))


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    policy = drafting(tmp_path)
    alone = sum(loss(policy, laid_out([(i,)]), 8) for i in range(3))
    assert loss(policy, laid_out([(0,), (1,), (2,)]), 8) == pytest.approx(alone, rel=1e-5)
    assert loss(policy, laid_out([(0, 1), (2,)]), 8) == pytest.approx(alone, rel=1e-5)
    assert loss(policy, in_a_line([(0, 1), (2,)]), 8) == pytest.approx(alone, rel=1e-5)


def test_a_packed_line_has_no_slot_for_a_first_token() -> None:
    batch = packed(tiny.BATCH, [(0, 1), (2,)])
    mask, kept = batch.attention_mask, batch.position_ids[0] > 0
    assert isinstance(mask, BlockMask)
    restricted = only_keys(mask, kept)
    length = len(kept)
    whole, fewer = (create_mask(m.mask_mod, 1, 1, length, length, device="cpu") for m in (mask, restricted))
    own = torch.eye(length, dtype=torch.bool)
    assert torch.equal(fewer, whole & (kept | own)) and not torch.equal(fewer, whole)
    expected = create_block_mask(restricted.mask_mod, 1, 1, length, length, device="cpu")
    assert all(torch.equal(*pair) for pair in zip(blocks(restricted), blocks(expected), strict=True))


def test_a_second_token_has_no_slot_that_predicts_it(tmp_path: Path) -> None:
    policy, answer = drafting(tmp_path), [tiny.trajectory((3,), (5,))]
    assert loss(policy, laid_out([(0,)], answer), 1) == 0.0


def test_tokens_that_it_does_not_draft_are_not_learned_and_do_not_agree(tmp_path: Path) -> None:
    tiny.policy(tmp_path / "model")
    head = write_new_head(tmp_path / "model", tmp_path / "head", draft_vocabulary=6)
    assert head.token_ids().tolist() == [0, 1, 2, 3, 4, 5], "token 1 ends an answer"
    policy = drafting(tmp_path)
    assert policy.drafter is not None
    policy.drafter.begin()
    drafted, others = [tiny.trajectory((3, 4), (5, 1))], [tiny.trajectory((3, 4), (9, 8))]
    assert loss(policy, laid_out([(0,)], others), 2) == 0.0
    assert policy.drafter.metrics() == {"drafter_loss": 0.0, "drafter_agreement": 0.0}
    assert loss(policy, laid_out([(0,)], drafted), 2) > 0.0


def test_what_a_checkpoint_says_of_its_vocabulary_is_published_as_it_is(tmp_path: Path) -> None:
    drafting(tmp_path)
    said = torch.ones(40, dtype=torch.bool)
    with_tensor("t2d", said)(tmp_path / "head")
    drafter = drafting(tmp_path).drafter
    assert drafter is not None and torch.equal(drafter.tensors()["drafter.t2d"], said)


def test_a_gradient_of_the_drafter_that_is_not_finite_leaves_it_as_it_is(tmp_path: Path) -> None:
    policy = drafting(tmp_path)
    assert policy.drafter is not None
    with torch.no_grad():
        policy.drafter.head.norm.weight[0] = float("inf")
    drafter, own = copies(policy.drafter.tensors()), copies(dict(policy.model.named_parameters()))
    metrics = Learner(policy, CONFIG).step(tiny.BATCH)
    assert not metrics["skipped"] and metrics["drafter_loss"] != metrics["drafter_loss"]
    assert all(torch.equal(drafter[name], tensor) for name, tensor in policy.drafter.tensors().items())
    assert not any(torch.equal(own[name], tensor) for name, tensor in policy.model.named_parameters())


def test_an_ended_vocabulary_keeps_what_ends_an_answer(tmp_path: Path) -> None:
    other = tiny.model("llama", eos_token_id=39)
    other.save_pretrained(tmp_path / "model")
    ids = write_new_head(tmp_path / "model", tmp_path / "head", draft_vocabulary=5).token_ids()
    assert ids.tolist() == [0, 1, 2, 3, 39]
    head = read_head(tmp_path / "head")
    torch.testing.assert_close(head.lm_head.weight, other.lm_head.weight[ids], rtol=0, atol=0.05)
    assert not torch.equal(head.lm_head.weight, other.lm_head.weight[ids]), "vLLM would share the model's"
    with pytest.raises(ValueError, match=r"^expected a directory that does not exist, got .*head$"):
        write_new_head(tmp_path / "model", tmp_path / "head")
    with pytest.raises(ValueError, match=r"^expected a draft vocabulary of 2 to 40 tokens, got 41$"):
        write_new_head(tmp_path / "model", tmp_path / "other", draft_vocabulary=41)


def without(name: str) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        tensors = load_file(head / "model.safetensors")
        del tensors[name]
        save_file(tensors, head / "model.safetensors")

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        save_file(load_file(head / "model.safetensors") | {name: tensor}, head / "model.safetensors")

    return change


def copy_the_output(head: Path) -> None:
    own = load_file(head.with_name("model") / "model.safetensors")["lm_head.weight"]
    with_tensor("lm_head.weight", own)(head)


def with_setting(**settings: Any) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | settings))

    return change


def of_another_model(**changed: int) -> Callable[[Path], None]:
    def change(head: Path) -> None:
        tiny.model("llama", **changed).save_pretrained(head.with_name("other"))
        shutil.rmtree(head)
        write_new_head(head.with_name("other"), head)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (of_another_model(hidden_size=32), "expected a drafter with the model's hidden_size, 16, got 32"),
        (of_another_model(vocab_size=48), "expected a drafter with the model's vocab_size, 40, got 48"),
        (of_another_model(num_hidden_layers=9), "reads different layers of 1 to 2, got [2, 4, 6]"),
        (without("fc.weight"), "the drafter's 'fc.weight': expected shape [16, 32], got none"),
        (with_tensor("extra", torch.ones(1)), "the drafter's 'extra': expected none, got shape [1]"),
        (with_tensor("norm.weight", torch.ones(3)), "'norm.weight': expected shape [16], got shape [3]"),
        (with_tensor("embed_tokens.weight", torch.ones(40, 16)), "a head without embeddings of its own"),
        (with_tensor("d2t", torch.ones(40, dtype=torch.int64)), "'d2t' to name 40 different tokens"),
        (copy_the_output, "an output matrix of its own, got the model's"),
        (with_setting(architectures=["MistralForCausalLM"]), "architecture LlamaForCausalLMEagle3, got"),
        (with_setting(num_hidden_layers=2), "an EAGLE-3 head with num_hidden_layers 1, got 2"),
        (with_setting(fc_norm=True), "an EAGLE-3 head with fc_norm False, got True"),
        (lambda head: (head / "model.safetensors").write_bytes(b"{}"), "model.safetensors cannot be read"),
        (lambda head: (head / "model.safetensors").unlink(), "without model.safetensors"),
        (lambda head: shutil.rmtree(head), "without config.json"),
    ],
)
def test_what_is_no_head_of_the_model_is_refused_in_a_sentence(
    tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    policy = drafting(tmp_path)
    change(tmp_path / "head")
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        TrainedDrafter(DrafterConfig(model=str(tmp_path / "head")), policy.model, policy.directory)
    assert str(tmp_path / "head") in str(caught.value)


def test_a_model_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    sizes = {**tiny.SIZES, "layer_types": ["full_attention"] * 2}
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path / "model")
    write_new_head(tmp_path / "model", tmp_path / "head")
    with pytest.raises(ValueError, match=r"^expected a model with plain embeddings .*, got Gemma3"):
        drafting(tmp_path)


def test_without_a_drafter_no_layer_has_a_hook(tmp_path: Path) -> None:
    policy = tiny.policy(tmp_path)
    assert policy.drafter is None and not any(each._forward_hooks for each in policy.model.modules())
