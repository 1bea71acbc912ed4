"""Two processes over Gloo: sharding must not change any result, and both ranks have the same."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.tiny_models import add_mtp
from tests.trainers import tiny
from tests.two_ranks import both, grouped
from trainers.eagle3 import write_new_head
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.layers import decoder_layers
from trainers.learner import Learner
from trainers.output_head import OutputHead
from trainers.settings import DrafterConfig, LearnerConfig, LoraConfig, OptimizerConfig
from trainers.sources import MTP, ParameterSource
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_microbatch=8)
BATCH = [
    tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0, version=4),
    tiny.trajectory((3, 4), (7, 1), advantage=-1.0, version=3),
    tiny.trajectory((8, 9, 10), (11, 12, 13), advantage=0.5, version=1),
]
SEQUENCES = [((3, 4, 5), 6), ((7,), 8), ((9, 10, 11, 12, 13), 14), ((15, 16), 17)]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it is loaded, and how near two ranks come to one process."""

    kind: str
    given: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    drafts: Literal["eagle3", "mtp"] | None = None
    lora: LoraConfig | None = None


CASES = (
    Case("llama-tied", drafts="eagle3"),
    Case("qwen3-vl"),
    Case("qwen3.5", drafts="mtp"),
    Case("qwen3-moe", {"activation_checkpointing": True}),
    Case("qwen3", lora=LoraConfig(publish="merged", rank=4, alpha=6.0)),
    # Other micro-batches, so other sums of rounded numbers; AdamW's first steps magnify the small ones.
    Case("llama", {"compute_dtype": "bfloat16", "activation_checkpointing": True}, 0.1),
)


def load(directory: Path, case: Case, mesh: DeviceMesh | None = None) -> TrainedPolicy:
    """A policy whose logits are made of three positions at a time."""
    policy = TrainedPolicy.load(directory, mesh=mesh, **case.given)
    if case.lora:
        policy.adapt(case.lora, seed=3)
    policy._head = OutputHead(policy.model, at_once=3 * 40)
    if case.drafts:
        head = str(directory / "head") if case.drafts == "eagle3" else None
        policy.attach_drafter(DrafterConfig(model=head, learning_rate=1e-3))
    return policy


def all_of(policy: TrainedPolicy, dtype: torch.dtype | None = None) -> ParameterSource:
    drafter = None if policy.drafter is None else policy.drafter.tensors()
    return ParameterSource(policy.model, dtype=dtype, drafter=drafter, adapter=policy.adapter)


def head_of(directory: Path, case: Case) -> dict[str, torch.Tensor]:
    if case.drafts == "eagle3":
        return load_file(directory / "head" / "model.safetensors")
    stored = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in stored.items() if name.startswith(MTP)}


def sharded_rank(rank: int, directory: Path) -> None:
    with grouped(rank, directory):
        for case in CASES:
            out = learned_by_a_rank(directory / case.kind, case)
            if rank == 0:
                torch.save(out, directory / case.kind / "out.pt")


def learned_by_a_rank(directory: Path, case: Case) -> dict[str, Any]:
    policy = load(directory, case, mesh_of_all_ranks("cpu"))
    source = all_of(policy)
    before = {name: tensor.clone() for name, tensor in source}
    learner = Learner(policy, CONFIG)
    metrics = [learner.step(BATCH, published=4), learner.step(BATCH, published=4)]
    shares: list[dict[int, float]] = [{}, {}]
    torch.distributed.all_gather_object(shares, learner.score(SEQUENCES))
    local = sum(p.to_local().numel() for p in policy.model.parameters() if isinstance(p, DTensor))
    after = {name: tensor.clone() for name, tensor in source}
    of_both: list[dict[str, torch.Tensor]] = [{}, {}]
    torch.distributed.all_gather_object(of_both, after)
    assert all(torch.equal(tensor, of_both[1][name]) for name, tensor in of_both[0].items())
    rounded = {name: tensor.clone() for name, tensor in all_of(policy, torch.bfloat16)}
    policy.load_weights(directory)
    if policy.drafter is not None:
        policy.drafter.load(head_of(directory, case), directory)
    restored = {name: tensor.clone() for name, tensor in source}
    return {
        "before": before,
        "after": after,
        "rounded": rounded,
        "restored": restored,
        "metrics": metrics,
        "scores": shares[0] | shares[1],
        "local": local,
        "names": [spec.name for spec in source.specs()],
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks learned, a directory for each case: processes that import torch start slowly."""
    directory = tmp_path_factory.mktemp("ranks")
    for case in CASES:
        tiny.policy(directory / case.kind, case.kind)
        if case.drafts == "eagle3":
            write_new_head(directory / case.kind, directory / case.kind / "head")
        if case.drafts == "mtp":
            add_mtp(directory / case.kind, tiny.SIZES["num_hidden_layers"])
    both(sharded_rank, directory)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one starts the ranks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_two_ranks_learn_and_publish_what_one_process_does(directory: Path, case: Case) -> None:
    policy = load(directory / case.kind, case)
    of_ranks = torch.load(directory / case.kind / "out.pt", weights_only=False)
    source = all_of(policy)
    original = {name: tensor.clone() for name, tensor in source}
    assert list(of_ranks["before"]) == list(original) == of_ranks["names"]
    assert all(torch.equal(of_ranks["before"][name], tensor) for name, tensor in original.items())
    learner = Learner(policy, CONFIG)
    expected = [learner.step(BATCH, published=4), learner.step(BATCH, published=4)]
    assert of_ranks["scores"] == pytest.approx(learner.score(SEQUENCES), abs=case.tolerance)
    near = case.tolerance
    for name, tensor in source:
        torch.testing.assert_close(of_ranks["after"][name], tensor, rtol=near, atol=near / 50)
    assert all(torch.equal(of_ranks["restored"][name], tensor) for name, tensor in original.items())
    for name, tensor in of_ranks["rounded"].items():
        assert torch.equal(tensor, of_ranks["after"][name].bfloat16())
    for mine, theirs in zip(expected, of_ranks["metrics"], strict=True):
        assert theirs.keys() == mine.keys() and mine["staleness_max"] == 3
        for name in mine.keys() - {"step_s"}:
            assert theirs[name] == pytest.approx(mine[name], rel=near, abs=near / 50), name
    assert "logprob_difference_max" in expected[0] and "logprob_difference_max" not in expected[1]
    total = sum(p.numel() for name, p in policy.model.named_parameters() if ".lora_" not in name)
    assert of_ranks["local"] == pytest.approx(total / 2, rel=0.1)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="ModuleList named 'layers', got Linear"):
        decoder_layers(torch.nn.Linear(1, 1))
