"""The trainer's routers take the experts that the rollout engine's took."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import call
from tests.tiny_models import tiny_config
from tests.trainers import tiny
from tests.trainers.vllm_experts import scored
from trainers.batching import TokenBatch, collate
from trainers.fsdp2 import model_class
from trainers.packed_lines import pack
from trainers.routing_replay import RoutingReplay
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import RoutedExperts, Trajectory

CPU = torch.device("cpu")
LAYERS = 2


def routed(trajectory: Trajectory, ids: Callable[[int], list[int]]) -> Trajectory:
    """With these experts at each position, in every layer."""
    rows = [layer for position in range(len(trajectory) - 1) for layer in [ids(position)] * LAYERS]
    given = torch.tensor(rows, dtype=torch.uint8)
    experts = RoutedExperts(layers=LAYERS, top_k=given.shape[1], dtype="uint8", ids=given.numpy().tobytes())
    return replace(trajectory, routed_experts=experts)


@pytest.mark.parametrize(
    "lay_out", [collate, lambda *args, **options: pack(*args, token_budget=128, **options)]
)
def test_each_position_has_its_own_experts(lay_out: Callable[..., TokenBatch]) -> None:
    """A prompt's are those of one of its completions; the last token of each is routed by the trainer."""
    answers = [
        tiny.trajectory((5, 6), (7, 8, 9)),
        tiny.trajectory((10,), (11,)),
        tiny.trajectory((5, 6), (12,)),
    ]
    answers = [routed(each, lambda position: [position, 7]) for each in answers]
    answers.append(tiny.trajectory((5, 6), (13, 14)))  # of an engine that does not return them
    batch = lay_out(answers, [(0, 2, 3), (1,)], pad_token_id=0, device=CPU)
    assert batch.routed is not None
    of_tokens = {
        token: chosen[0]
        for token, chosen in zip(batch.input_ids.flatten().tolist(), batch.routed[:, 0].tolist(), strict=True)
    }
    expected = {5: 0, 6: 1, 7: 2, 8: 3, 9: -1, 10: 0, 11: -1, 12: -1, 13: -1, 14: -1, 0: -1}
    assert of_tokens == expected
    assert lay_out(answers[-1:], [(0,)], pad_token_id=0, device=CPU).routed is None


FAMILIES = [
    *(
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "glm4_moe",
        "minimax_m2",
        "ernie4_5_moe",
        "llama4_text",
    ),
    *("granitemoe", "hunyuan_v1_moe", "nemotron_h", "jetmoe"),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_routers_of_every_kind_are_replaced(family: str) -> None:
    torch.manual_seed(0)
    config: Any = tiny_config(family)
    model = model_class(config).from_config(config).eval()
    ids, replay = torch.randint(2, 200, (1, 9)), RoutingReplay(model)
    top_k = getattr(config, "num_experts_per_tok", None) or config.moe_topk
    own = torch.full((9, config.num_hidden_layers, top_k), -1, dtype=torch.int16)
    others = torch.stack([torch.randperm(4)[:top_k] for _ in range(9 * config.num_hidden_layers)]).view_as(
        own
    )

    def logits(chosen: torch.Tensor | None) -> torch.Tensor:
        replay.use(chosen)
        return model(input_ids=ids, use_cache=False).logits[0]

    before = logits(None)
    assert torch.equal(logits(own), before), "where none is given the router chooses"
    last = own.clone()
    last[4:] = others[4:].to(torch.int16)
    changed = logits(last)
    torch.testing.assert_close(changed[:4], before[:4])
    assert not torch.allclose(changed[4:], before[4:])
    assert torch.equal(logits(None), before)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True, "selective"])
def test_gradients_are_those_of_the_replayed_pass(tmp_path: Path, kept: Any) -> None:
    """Also where a layer is computed again in the backward pass."""
    policy = TrainedPolicy.load(tiny.save(tmp_path, "qwen3-moe"), activation_checkpointing=kept)
    answer = tiny.trajectory((5, 6), (7, 8, 9))
    gradients = []
    for chosen in ([0, 1], [2, 3]):
        batch = collate([routed(answer, lambda _, ids=chosen: ids)], [(0,)], pad_token_id=0, device=CPU)  # type: ignore[misc]
        policy.scores(replace(batch, routed=batch.routed[:, :, :2])).logprobs.sum().backward()  # type: ignore[index]
        (experts,) = (
            each for name, each in policy.model.named_parameters() if name.endswith("1.mlp.experts.down_proj")
        )
        gradients.append(experts.grad.abs().sum((1, 2)) > 0)  # type: ignore[union-attr]
        policy.model.zero_grad()
    assert gradients[0][:2].all() and gradients[1][2:4].all() and not torch.equal(*gradients)


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    answer = tiny.trajectory((5, 6), (7, 8))
    sparse = TrainedPolicy.load(tiny.save(tmp_path / "moe", "qwen3-moe"))
    sparse.routing.check([answer, routed(answer, lambda _: [0, 1])])
    with pytest.raises(
        ValueError, match=r"trajectory 1: .* numbers below 4, .* got 2 layers and the number 9"
    ):
        sparse.routing.check([answer, routed(answer, lambda _: [0, 9])])
    dense = TrainedPolicy.load(tiny.save(tmp_path / "dense", "qwen3"))
    with pytest.raises(
        ValueError, match="expected 0 layers or more, and numbers below 0, as Qwen3ForCausalLM"
    ):
        dense.routing.check([routed(answer, lambda _: [0, 1])])
    sparse.routing.use(torch.zeros(4, 2, 3, dtype=torch.int16))
    with pytest.raises(ValueError, match="to choose 3 of 4 experts with one topk"):
        sparse.model(input_ids=torch.tensor([[5, 6, 7, 8]]))


@pytest.mark.slow
@torch.no_grad()
def test_replay_takes_away_what_routing_adds_to_the_difference_from_the_engine(tmp_path: Path) -> None:
    """What stays is bfloat16's rounding."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "moe_intermediate_size": 128}
    config = tiny_config("qwen3_moe", **sizes, num_experts=32, num_experts_per_tok=1, norm_topk_prob=True)
    model_class(config).from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokens = torch.randint(2, 258, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    logprobs, ids = call(scored, tmp_path / "model", tmp_path / "rendezvous", tokens)
    experts = RoutedExperts(layers=4, top_k=1, dtype="uint8", ids=ids.tobytes())
    answer = replace(tiny.trajectory((tokens[0],), tuple(tokens[1:])), routed_experts=experts)
    policy = TrainedPolicy.load(tmp_path / "model", dtype="bfloat16")
    policy.routing.check([answer])
    batch = collate([answer], [(0,)], pad_token_id=0, device=CPU)
    own, replayed = (
        (policy.scores(replace(batch, routed=routed)).logprobs - torch.from_numpy(logprobs)).abs()
        for routed in (None, batch.routed)
    )
    print(f"mean {own.mean():.4f}, worst {own.max():.3f}; {replayed.mean():.4f}, {replayed.max():.3f}")
    assert replayed.max() < 0.1 * own.max() and replayed.mean() < 0.15 * own.mean()
