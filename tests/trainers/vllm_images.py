"""Answers of vLLM to prompts with images, and a trainer's log-probabilities of them, in one process.

    python -m tests.trainers.vllm_images DIRECTORY FAMILY

Prints JSON in its last line: the largest difference of each answer, and whether the engine answers anew to an
image after its tower has changed, before its caches are reset and after.
"""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = [[(100, 70)], [(64, 64), (100, 70)], [], [(40, 200)]]


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def part(content: bytes) -> dict[str, Any]:
    """A part of a chat message."""
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def engine(model: Path) -> Any:
    """Whose core is in this process."""
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 2, "video": 0},
        logprobs_mode="raw_logprobs",
    )


def answers(llm: Any) -> list[dict[str, Any]]:
    """Trajectories in JSON form, without advantages."""
    from vllm import SamplingParams

    made = []
    for number, sizes in enumerate(SIZES):
        files = [picture(*size, seed=number) for size in sizes]
        content = [{"type": "text", "text": "look "}, *map(part, files), {"type": "text", "text": "what?"}]
        settings = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, seed=number, ignore_eos=True)
        output = llm.chat([{"role": "user", "content": content}], settings)[0]
        answer = output.outputs[0]
        by_token = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [candidates[token].logprob for token, candidates in by_token]
        made.append(
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": list(answer.token_ids),
                "logprobs": logprobs,
                "images": [base64.b64encode(file).decode() for file in files],
            }
        )
    return made


def differences(model: Path, sampled: list[dict[str, Any]]) -> list[float]:
    """Of each answer, the largest one between engine and trainer; all are in one batch."""
    from trainers.batching import collate
    from trainers.trained_policy import TrainedPolicy
    from trainers.trajectory import Trajectory

    policy = TrainedPolicy.load(model, vision="frozen")
    batch = [Trajectory.from_json({**each, "advantage": 1.0}) for each in sampled]
    rows = [(index,) for index in range(len(batch))]
    assert policy.images is not None
    tokens = policy.images.add(collate(batch, rows, pad_token_id=0, device=policy.device), batch)
    found = (policy.scores(tokens).logprobs - tokens.rollout_logprobs).abs()
    return [float(each.max()) for each in found.split(tokens.lengths.tolist())]


def is_new_after(llm: Any) -> list[bool]:
    """Whether an answer differs from that before the tower changed: without, and with a reset of caches."""
    from deployments.replica.engine_core import reset_caches

    core = llm.llm_engine.engine_core.engine_core
    before = answers(llm)[0]["logprobs"]
    (tower,) = llm.apply_model(lambda model: model.visual)
    tower.pos_embed.weight.data.add_(1.0)  # which is not repacked on a CPU
    core.scheduler.reset_prefix_cache()
    stale = answers(llm)[0]["logprobs"]
    reset_caches(core, True)
    return [stale != before, answers(llm)[0]["logprobs"] != before]


if __name__ == "__main__":
    from tests.tiny_models import save_tiny_seeing

    checkpoint = save_tiny_seeing(Path(sys.argv[1]), sys.argv[2])
    llm = engine(checkpoint)
    found: dict[str, list[Any]] = {"differences": differences(checkpoint, answers(llm))}
    if sys.argv[2] == "qwen3_vl":
        found["is_new_after"] = is_new_after(llm)
    print(json.dumps(found))
