"""What a trainer makes of images, with their processor: python -m tests.trainers.image_checks DIR"""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from tests.tiny_models import save_tiny_llama, save_tiny_seeing
from tests.trainers.vllm_images import picture
from trainers.batching import collate
from trainers.images import check_images
from trainers.learner import Learner
from trainers.settings import LearnerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

PAD = 260  # <|image_pad|>


def trajectory(prompt: list[int], *images: bytes, answer: tuple[int, ...] = (7, PAD, 8)) -> Trajectory:
    """The answer has a placeholder that was sampled, which stands for no image."""
    logprobs = tuple(-1.0 for _ in answer)
    return Trajectory(
        prompt_token_ids=tuple(prompt), token_ids=answer, logprobs=logprobs, advantage=1.0, images=images
    )


def refused(pattern: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError as error:
        assert re.search(pattern, str(error)), f"expected {pattern!r}, got {error}"
    else:
        raise AssertionError(f"expected {pattern!r}")


@torch.no_grad()
def as_transformers(model: Path) -> None:
    """Rows with padding and shared prompts have the log-probabilities that transformers computes of each
    answer alone."""
    policy = TrainedPolicy.load(model, vision="frozen")
    reader, good, other = policy.images, picture(64, 64), picture(100, 70)
    assert reader is not None
    answers = [
        trajectory([9, 258, *[PAD] * 4, 259, 3], good, answer=(40, 50, 60)),
        trajectory([9, 258, *[PAD] * 4, 259, 3], good, answer=(41,)),
        trajectory([258, *[PAD] * 6, 259, 7, 258, *[PAD] * 4, 259], other, good, answer=(30, 31)),
        trajectory([5, 6], answer=(7, 8)),
    ]
    rows = [(0, 1), (2,), (3,)] if policy.can_share_prompts else [(0,), (1,), (2,), (3,)]
    batch = reader.add(collate(answers, rows, pad_token_id=0, device=policy.device), answers)
    assert batch.images is not None
    assert len(batch.images.image_grid_thw) == (3 if policy.can_share_prompts else 4)
    expected = []
    for each in answers:
        tokens = torch.tensor([[*each.prompt_token_ids, *each.token_ids]])
        read = [reader.read(content) for content in each.images]
        seen: dict[str, torch.Tensor] = {}
        if read:
            seen["pixel_values"] = torch.cat([image.values for image in read])
            seen["image_grid_thw"] = torch.stack([image.grid for image in read])
            seen["mm_token_type_ids"] = (tokens == PAD).int()
        start = len(each.prompt_token_ids)
        logits = policy.model(input_ids=tokens, use_cache=False, **seen).logits[0, start - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(-1, tokens[0, start:, None])[:, 0])
    torch.testing.assert_close(policy.scores(batch).logprobs, torch.cat(expected), rtol=0, atol=1e-4)


def main(directory: Path) -> None:
    for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_5"):
        as_transformers(save_tiny_seeing(directory / family, family))
    model = save_tiny_seeing(directory / "seeing")
    policy = TrainedPolicy.load(model, vision="frozen")
    reader = policy.images
    good = picture(64, 64)  # 2 x 2 tokens
    seen = [258, *[PAD] * 4, 259]
    large = io.BytesIO()
    Image.new("1", (8193, 8192)).save(large, "PNG")
    for pattern, each in {
        r"trajectory 0: expected an image file .*, got 6 bytes": trajectory(seen, b"broken"),
        r"trajectory 0: expected an image file .*, got 90 bytes": trajectory(seen, good[:90]),
        r"expected an image of at most 67108864 pixels, got 8193 x 8192": trajectory(seen, large.getvalue()),
        r"expected placeholders of \[6\] tokens.*got \[4\]": trajectory(seen, picture(100, 70)),
        r"expected placeholders of \[4, 4\].*2 images, got \[4\]": trajectory(seen, good, good),
    }.items():
        refused(pattern, lambda each=each: check_images([each], reader))  # type: ignore[misc]
    batch = [trajectory(seen, good), trajectory(seen, picture(64, 64, seed=1)), trajectory([5, PAD, 6])]
    check_images(batch, reader)
    tower = [parameter.clone() for parameter in policy.model.get_encoder("image").parameters()]
    metrics = Learner(policy, LearnerConfig()).step(batch)
    assert metrics["grad_norm"] and not metrics["skipped"]
    assert all(map(torch.equal, tower, policy.model.get_encoder("image").parameters())), "frozen"
    trained = TrainedPolicy.load(model, vision="trained")
    Learner(trained, LearnerConfig()).step(batch)
    after = trained.model.get_encoder("image").parameters()
    moved = [not torch.equal(*pair) for pair in zip(tower, after, strict=True)]
    assert sum(moved) > len(moved) / 2, "trained"

    refused(
        "expected a vision-language model, got 'llama'", lambda: load(save_tiny_llama(directory / "l", 0))
    )
    (model / "preprocessor_config.json").unlink()
    refused("expected an image processor's configuration", lambda: load(model))
    other = shutil.copytree(save_tiny_seeing(directory / "b"), directory / "other")
    sizes = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(sizes | {"patch_size": 14}))
    refused("patches have 16 pixels.*got 14: it is of another model", lambda: load(other))
    print("all right")


def load(model: Path) -> TrainedPolicy:
    return TrainedPolicy.load(model, vision="frozen")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
