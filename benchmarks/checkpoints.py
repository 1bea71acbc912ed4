"""What a checkpoint for a restart costs the trainer.

    python -m benchmarks.models 1.7b /tmp/m17 --seed 0
    python -m benchmarks.checkpoints /tmp/m17
    python -m benchmarks.checkpoints --device cpu smollm2-135m

`--times` times an optimizer step on a small batch, then a checkpoint
(`deployments.trainer.restart_checkpoints`) as after a publish whose weights are rounded to bfloat16. *call*
is what the publish waits for, *copied* until the next step may change the weights, *written* until the files
are on the disk.
"""

import argparse
import tempfile
import time
from pathlib import Path

from app.settings.models import resolve_model
from deployments.trainer.restart_checkpoints import RestartCheckpoints
from trainers.learner import Learner
from trainers.settings import LearnerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

WRITE_LIMIT_S = 600.0


def batch(count: int = 4, length: int = 16) -> list[Trajectory]:
    """Answers of arbitrary tokens."""
    return [
        Trajectory(
            prompt_token_ids=(5, 6, 7),
            token_ids=tuple(range(10 + number, 10 + number + length)),
            logprobs=(-12.0,) * length,
            advantage=1.0 if number % 2 else -1.0,
            weight_versions=(),
        )
        for number in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    policy = TrainedPolicy.load(
        resolve_model(options.model),
        device=options.device,
        compute_dtype=None if options.device == "cpu" else "bfloat16",
    )
    learner = Learner(policy, LearnerConfig())
    print("| checkpoint | call (s) | copied (s) | written (s) |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        checkpoints = RestartCheckpoints(directory / "checkpoints", rank=0, keep=1)
        for number in range(options.times):
            learner.step(batch())
            began = time.perf_counter()
            if not checkpoints.save(learner, wire_dtype="bfloat16"):
                raise SystemExit("the former checkpoint is still being written")
            called = time.perf_counter() - began
            checkpoints.wait_until_copied()
            copied = time.perf_counter() - began
            newest = checkpoints.complete() if checkpoints.wait(WRITE_LIMIT_S) else []
            if not newest or newest[0][1].step != learner.steps_done:
                raise SystemExit("the checkpoint was not written")
            written = time.perf_counter() - began
            print(f"| {number + 1} | {called:.3f} | {copied:.2f} | {written:.1f} |", flush=True)
        size = sum(each.stat().st_size for each in directory.rglob("*.distcp"))
        checkpoints.discard()
        print(f"\n{size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
