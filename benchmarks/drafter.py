"""What an EAGLE-3 head is worth after RL steps: one that stayed as it was, and one that was trained along.

    python -m benchmarks.drafter [--model smollm2-135m] [--minutes 4] [--steps 20] [--tokens 2]

One process has an engine that drafts and a trainer on the same device. A new head learns from answers of the
policy for some minutes, during which the policy stays as it is. Then come RL steps that train both; the
reward is the share of words that begin with an s. At the end the engine loads the last policy with the new,
the stale and the fresh head in turn and answers the same prompts; with the last one it does so again while
drafting is off (`engine.min_draft_acceptance`), and then an engine without a drafter does.
Answers are sampled at temperature 1. *accepted*: the share of drafted tokens; *a step*: tokens that a
sequence gets in one step of the engine.
"""

import argparse
import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from app.settings.models import resolve_model
from benchmarks.weight_sync import start_engine
from trainers.eagle3 import write_new_head
from trainers.learner import Learner
from trainers.settings import DrafterConfig, LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

GROUP = 8  # answers to a prompt
STREAMS = 128  # of a batch: vLLM's largest CUDA graph has 512 tokens, and each stream three or more
KINDS = (
    "a story",
    "a letter",
    "a recipe",
    "a poem",
    "instructions",
    "a dialogue",
    "an argument",
    "a summary",
)
TOPICS = ("the sea", "a lost dog", "bread", "winter", "a new bridge", "honesty", "the moon", "a train")
PROMPTS = [f"Write {kind} about {topic}." for kind, topic in itertools.product(KINDS, TOPICS)]


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one call; `drafts`: how often the engine drafted."""

    trajectories: list[Trajectory]
    texts: list[str]
    seconds: float
    drafts: int
    drafted: int
    accepted: int

    def row(self, name: str, streams: int) -> str:
        tokens = sum(len(each.token_ids) for each in self.trajectories)
        shares = (
            f"{self.accepted / self.drafted:.3f} | {1 + self.accepted / self.drafts:.2f}"
            if self.drafts
            else "- | 1.00"
        )
        return f"| {name} | {streams} | {shares} | {tokens / self.seconds:.0f} |"


class Rollouts:
    """An engine, with the tokens of the prompts."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.engine, self._options = engine, options
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        self.prompts = [
            tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in chats
        ]
        self._numbers = itertools.count()

    async def sample(self, prompts: Sequence[int], streams: int) -> Answers:
        """An answer to each of the numbered prompts, `streams` at a time."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        gate = asyncio.Semaphore(streams)
        # Without seeds: vLLM samples each seeded request by itself.
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=self._options.answer,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(number: int) -> Any:
            prompt = {"prompt_token_ids": list(self.prompts[number])}
            async with gate:
                async for output in self.engine.llm.generate(prompt, sampling, f"r{next(self._numbers)}"):
                    found = output.outputs[0]
            return found

        before, began = _counts(), time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - began
        counts = [now - then for now, then in zip(_counts(), before, strict=True)]
        made = [
            Trajectory(
                prompt_token_ids=self.prompts[number],
                token_ids=tuple(answer.token_ids),
                logprobs=tuple(
                    each[token].logprob for token, each in zip(answer.token_ids, answer.logprobs, strict=True)
                ),
                advantage=0.0,
                weight_versions=(),
            )
            for number, answer in zip(prompts, answers, strict=True)
        ]
        return Answers(made, [answer.text for answer in answers], seconds, *counts)


def _counts() -> tuple[int, int, int]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    values = {each.name: getattr(each, "value", 0) for each in get_metrics_snapshot()}
    drafts, drafted, accepted = (
        values.get(f"vllm:spec_decode_num_{name}", 0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return drafts, drafted, accepted


def rewarded(found: Answers) -> tuple[list[Trajectory], float]:
    """With GRPO's advantages, and the mean reward."""
    words = [text.lower().split() for text in found.texts]
    rewards = torch.tensor([sum(w.startswith("s") for w in each) / max(len(each), 1) for each in words])
    groups = rewards.view(-1, GROUP)
    centered = groups - groups.mean(1, keepdim=True)
    advantages = (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    made = [
        replace(each, advantage=advantage)
        for each, advantage in zip(found.trajectories, advantages, strict=True)
    ]
    return made, float(rewards.mean())


def write(policy: TrainedPolicy, model: Path, directory: Path) -> Path:
    """A version that an engine can load."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    policy.model.save_pretrained(directory)
    assert policy.drafter is not None
    policy.drafter.write(directory / "drafter")
    return directory


async def measure(options: argparse.Namespace, root: Path) -> None:
    on_gpu = options.device == "cuda"
    head = root / "head"
    write_new_head(options.model, head, draft_vocabulary=options.draft_vocabulary)
    policy = TrainedPolicy.load(
        options.model, device=options.device, compute_dtype="bfloat16" if on_gpu else None
    )
    policy.attach_drafter(DrafterConfig(model=str(head), learning_rate=options.head_rate))
    learner = Learner(
        policy,
        LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=options.rate, weight_decay=0.0),
            max_tokens_per_microbatch=16_384,
        ),
    )
    most = 2 * STREAMS
    arguments = {
        "max_model_len": 1024,
        "dtype": "bfloat16" if on_gpu else "float32",
        "enforce_eager": options.eager,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 8 << 30,  # vLLM does not measure then, which other processes disturb
        "max_num_seqs": most,
    }
    backend, staging = ("slipstream_ipc", "device") if on_gpu else ("shm", "host")
    drafts = {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": options.tokens,
        # With a 0, CUDA graphs of steps without drafts are captured, as `min_draft_acceptance` demands.
        "num_speculative_tokens_per_batch_size": [[1, most - 1, options.tokens], [most, most, 0]],
    }
    engine = await start_engine(str(options.model), backend, staging, speculative_config=drafts, **arguments)
    rollouts = Rollouts(engine, options)
    drawn = torch.Generator().manual_seed(0)
    versions = itertools.count(1)

    async def batch() -> Answers:
        chosen = torch.randperm(len(PROMPTS), generator=drawn)[: options.groups].tolist()
        return await rollouts.sample([each for each in chosen for _ in range(GROUP)], STREAMS)

    new = write(policy, options.model, root / "new")
    before = policy.model.get_input_embeddings().weight.detach().clone()
    print("| phase | step | reward | drafter's loss | agreement | accepted | step (s) |\n" + "|---" * 7 + "|")
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < 60 * options.minutes:
        found = await batch()  # advantages of zero: the policy stays
        for _ in range(options.repeats):
            metrics = learner.step(found.trajectories)
        step += 1
        if step % options.every == 1 or options.every == 1:
            _print("head alone", step, 0.0, metrics, found)
    assert torch.equal(before, policy.model.get_input_embeddings().weight), "the policy has learned"
    stale = write(policy, options.model, root / "version")
    shutil.copytree(stale / "drafter", root / "stale")
    await engine.load(str(stale), next(versions))
    for step in range(1, options.steps + 1):
        found = await batch()
        trajectories, reward = rewarded(found)
        metrics = learner.step(trajectories)
        _print("RL", step, reward, metrics, found)
        fresh = write(policy, options.model, root / f"version-{step}")
        await engine.load(str(fresh), next(versions))
        shutil.rmtree(root / f"version-{step - 1}", ignore_errors=True)

    print("\n| drafter | streams | accepted | a step | tokens/s |\n" + "|---" * 5 + "|")

    async def ask(name: str) -> None:
        await rollouts.sample(range(8), 8)
        for streams in options.streams:
            numbers = [each % len(PROMPTS) for each in range(max(streams, 8) * options.repetitions)]
            print((await rollouts.sample(numbers, streams)).row(name, streams), flush=True)

    for name, directory in (("new", new / "drafter"), ("stale", root / "stale"), ("fresh", None)):
        loaded = root / f"ask-{name}"
        shutil.copytree(fresh, loaded)
        if directory is not None:
            shutil.rmtree(loaded / "drafter")
            shutil.copytree(directory, loaded / "drafter")
        await engine.load(str(loaded), next(versions))
        await ask(name)
    engine.stop_drafting(engine.version)
    await ask("off")
    await engine.stop()
    rollouts.engine = await start_engine(str(fresh), backend, staging, **arguments)
    await ask("none")
    await rollouts.engine.stop()


def _print(phase: str, step: int, reward: float, metrics: Any, found: Answers) -> None:
    print(
        f"| {phase} | {step} | {reward:.4f} | {metrics['drafter_loss']:.3f} | "
        f"{metrics['drafter_agreement']:.3f} | {found.accepted / max(found.drafted, 1):.3f} | "
        f"{metrics['step_s']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=4.0, help="of the head alone")
    parser.add_argument("--repeats", type=int, default=2, help="steps of the head alone on the same answers")
    parser.add_argument("--every", type=int, default=10, help="steps of the head alone between two lines")
    parser.add_argument("--steps", type=int, default=20, help="of RL")
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step, of 8 answers each")
    parser.add_argument("--answer", type=int, default=192, help="tokens at most")
    parser.add_argument("--tokens", type=int, default=2, help="that are drafted at a time")
    parser.add_argument("--draft-vocabulary", type=int, default=16_384)
    parser.add_argument("--rate", type=float, default=2e-5, help="the policy's learning rate")
    parser.add_argument("--head-rate", type=float, default=1e-3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    options.model = Path(resolve_model(options.model))
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(options, Path(root)))


if __name__ == "__main__":
    main()
