"""One recipe, four programs on the same machine: Slipstream beside TRL.

    python -m benchmarks.run [--gpus 0 1] [--programs ours trl trl-async trl+ours] [--kill 20] [--json FILE]

    ours        `slipstream rl` on a fleet: one replica and its trainer
    trl         TRL's GRPOTrainer with `vllm serve`; on one GPU with an engine in its own process
    trl-async   TRL's AsyncGRPO with `vllm serve`
    trl+ours    TRL's GRPOTrainer in server mode, on a fleet

On two GPUs the engine has the first and the trainer the second; on one they share it. The task is arithmetic
with two digits (`benchmarks.recipe`), the model SmolLM2-135M or a directory. A program that fails, or makes
no step for `--patience` seconds, has its reason in the last column.

Columns: *start* until training begins; *to goal* from then until the mean reward of three steps reaches it;
*tokens/s* are sampled, and learned from, for each GPU; *idle* is the time without a kernel on each GPU;
*update* is the time that a step's weights take to the engine; *lost* are tokens that the engine made and
nobody learned from; *outage* is the time from the kill to the next step. Rates are of the steps between the
first and the kill. The JSON also has the processor time of a step, by process, and the
parts of our rounds.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple
from unittest import mock

import httpx
import psutil

from app.client import calls
from app.client.connection import FleetClient
from app.jobs import metrics
from app.settings.models import resolve_model
from benchmarks.process_samples import title
from benchmarks.recipe import Recipe, Step, problems, steps
from benchmarks.recovery import MARK, marked, victims
from benchmarks.servers import CPU, MODEL, Setup, fleet, vllm_serve

PROGRAMS = ("ours", "trl", "trl-async", "trl+ours")
GENERATED = "vllm:generation_tokens_total"
AT_GOAL, LAST = 3, 5  # steps of whose rewards the mean is taken
COLUMNS = {
    **{"program": "", "start_s": ".0f", "steps": "", "step_s": ".2f", "to_goal_s": ".1f"},
    **{"steps_to_goal": "", "last_reward": ".2f", "tokens_per_s": ".0f", "idle": "", "staleness": ".2f"},
    **{"update_s": ".3f", "wait_s": ".3f", "lost": ".1%", "outage_s": ".1f", "steps_after_kill": ""},
    "ended": "",
}
Row = dict[str, Any]  # by the names of COLUMNS; what is not known is left out


def line(row: Row) -> str:
    return (
        f"| {' | '.join(format(row[name], form) if name in row else '' for name, form in COLUMNS.items())} |"
    )


class Watch:
    """Samples the use of GPUs, and the tokens that an engine has made, on threads."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.url: str | None = None  # of the engine
        self.gpus = gpus
        self.use: list[tuple[float, str, float]] = []
        self.samples: list[tuple[float, float]] = []
        self.processors: list[tuple[int, dict[str, float]]] = []  # after so many steps: seconds by process
        self._done = threading.Event()

    @contextmanager
    def running(self) -> Iterator["Watch"]:
        threads = [threading.Thread(target=self._watch_engine)]
        with ExitStack() as stack:
            if self.gpus:
                command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]
                command += [f"--id={','.join(self.gpus)}", "-lms", "200"]
                sampler = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                threads.append(threading.Thread(target=self._watch_gpus, args=(sampler.stdout,)))
            for thread in threads:
                thread.start()
                stack.callback(thread.join)
            if self.gpus:
                stack.callback(sampler.kill)
            stack.callback(self._done.set)
            yield self

    def idle(self, begin: float, end: float) -> str:
        """Of each GPU."""
        use = [[u for when, gpu, u in self.use if gpu == one and begin <= when <= end] for one in self.gpus]
        return ", ".join(f"{1 - fmean(each) / 100:.0%}" for each in use if each)

    def made(self, begin: float, end: float) -> float:
        """Tokens; a new engine counts from zero."""
        counts = [count for when, count in self.samples if begin <= when <= end]
        return sum(max(0.0, after - before) for before, after in pairwise(counts))

    def processor_ms(self) -> dict[str, float]:
        """Of a step, by process, the largest first."""
        if len(self.processors) < 2:
            return {}
        (first, before), (last, after) = self.processors[0], self.processors[-1]
        spent = {name: 1000 * (s - before.get(name, 0.0)) / (last - first) for name, s in after.items()}
        largest = sorted(spent.items(), key=lambda each: -each[1])
        return {name: round(ms, 1) for name, ms in largest if ms >= 1.0}

    def _watch_gpus(self, lines: Iterator[str]) -> None:
        for each in lines:
            with contextlib.suppress(ValueError):  # "[N/A]"
                gpu, share = each.split(",")
                self.use.append((time.time(), gpu.strip(), float(share)))

    def _watch_engine(self) -> None:
        while not self._done.wait(0.5):
            with contextlib.suppress(httpx.HTTPError):
                if self.url is not None:
                    self.samples.append((time.time(), generated_tokens(self.url)))


def generated_tokens(url: str) -> float:
    """Of a fleet, or of an engine. A fleet's metrics are of all its processes, and cost it more."""
    load = httpx.get(f"{url}/fleet/load", timeout=5)
    if load.is_success:
        return sum(each["generated_tokens"] for each in load.json()["replicas"].values())
    lines = httpx.get(f"{url}/metrics", timeout=5).text.split("\n")
    return sum(float(each.split()[-1]) for each in lines if each.startswith(GENERATED))


def our_fleet(
    recipe: Recipe, gpus: Sequence[str], port: int, *, trained: bool
) -> AbstractContextManager[str]:
    """A replica, with a trainer or for TRL's."""
    engine, settings = engine_arguments(recipe), {"rollouts": {}} if trained else {}
    trainer: dict[str, Any] = {"optimizer": {"learning_rate": recipe.learning_rate}}
    if recipe.device == "cpu":
        trainer["max_tokens_per_microbatch"] = 2048
        engine["extra"] = {} if trained else LORA | FOR_TRL
    else:
        engine["extra"] = {"kv_cache_memory_bytes": KV_CACHE} | ({} if trained else FOR_TRL)
        weights = {"transport": "nccl", "staging": "device"} | ({} if trained else {"wire": "vllm"})
        settings |= {"device": "cuda", "weights": weights}
        # Not packed: FlexAttention compiles for 15 s in the first step, longer than all of this run's others.
        trainer |= {"compute_dtype": "bfloat16", "wire_dtype": "bfloat16", "max_tokens_per_microbatch": 16384}
        if trained and len(gpus) == 1:
            settings |= {"placement": "colocated", "weights": weights | {"transport": "ipc"}}
            engine["gpus_per_rank"] = trainer["gpus_per_rank"] = 0.5
    if trained:
        settings["trainer"] = trainer
    return fleet(port, setup=Setup(model=recipe.model, engine=engine, settings=settings), trainer=trained)


def their_server(recipe: Recipe, gpus: Sequence[str], port: int) -> AbstractContextManager[str]:
    engine = engine_arguments(recipe) | FOR_TRL
    if recipe.device == "cpu":
        engine |= LORA
        environment = CPU.environment | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    else:
        engine |= {"enable_scale_out": True, "weight_transfer_config": '{"backend": "nccl"}'}
        engine |= {"kv_cache_memory_bytes": KV_CACHE}
        environment = {}
    return vllm_serve(port, setup=Setup(model=recipe.model, engine=engine, environment=environment))


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    if recipe.device == "cpu":
        return {**CPU.engine, "max_model_len": 1024}
    return {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 256, "gpu_memory_utilization": 0.4}


KV_CACHE = 16 << 30  # bytes; vLLM need not measure then, which other processes on a GPU disturb
FOR_TRL = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}  # a CPU's way for AsyncGRPO's weights


class Program(NamedTuple):
    """One program, ready to start."""

    engine: Callable[[], AbstractContextManager[str | None]]  # yields its URL
    engine_gpus: Sequence[str]
    command: Callable[[str | None], list[str]]  # of the learner
    learner_gpus: Sequence[str]
    steps: Callable[[], list[Step]]
    began: Callable[[], float | None]  # training, seconds since 1970


def our_program(recipe: Recipe, gpus: Sequence[str], port: int, root: Path) -> Program:
    record, file = root / "run.jsonl", root / "prompts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in problems(recipe.seed)), encoding="utf-8")

    def command(url: str | None) -> list[str]:
        options = {
            **{"url": url, "metrics": record, "prompts": file, "reward": "benchmarks.recipe:reward"},
            **{"extract": "whole", "stop": "", "steps": recipe.steps, "max-tokens": recipe.max_tokens},
            **{"groups-per-step": recipe.groups, "groups-in-flight": recipe.groups},
            **{"answers-per-group": recipe.answers, "max-staleness": recipe.max_staleness},
        }
        return [sys.executable, "-m", "app.jobs", *(f"--{name}={value}" for name, value in options.items())]

    def done() -> list[Step]:
        return [
            Step(
                step=each.step,
                ended=each.ended,
                reward=each.reward,
                tokens=each.answer_tokens_mean * each.groups * recipe.answers,
                staleness=each.staleness_mean,
                update_s=each.publish_s,
                wait_s=each.wait_s,
            )
            for each in (metrics.records(record) if record.exists() else [])
        ]

    def began() -> float | None:
        found = metrics.last_configuration(record) if record.exists() else None
        return None if found is None else found.began

    return Program(lambda: our_fleet(recipe, gpus, port, trained=True), gpus, command, gpus, done, began)


def their_program(name: str, recipe: Recipe, gpus: Sequence[str], port: int, root: Path) -> Program:
    record, began = root / "steps.jsonl", root / "began"
    if len(gpus) == 1 and name != "trl":
        raise ValueError("needs two GPUs: NCCL does not connect two processes on one")

    def engine() -> AbstractContextManager[str | None]:
        if name == "trl+ours":
            return our_fleet(recipe, gpus[:1], port, trained=False)
        if name == "trl" and len(gpus) < 2:
            return contextlib.nullcontext()
        return their_server(recipe, gpus, port)

    def command(url: str | None) -> list[str]:
        options = {"program": name, "recipe": asdict(recipe), "url": url, "root": str(root)}
        return [sys.executable, "-m", "benchmarks.run_trl", json.dumps(options)]

    def began_at() -> float | None:
        return began.stat().st_mtime if began.exists() else None

    return Program(engine, gpus[:1], command, gpus[-1:], lambda: steps(record), began_at)


def round_parts(url: str) -> dict[str, float]:
    """Of the rounds of all steps but the first, medians of what a round's seconds are made of."""
    with FleetClient.connect(url) as client:
        ended = client.send(calls.rounds())[1:]
    return {part: median(each.parts[part] for each in ended) for part in (ended[0].parts if ended else ())}


def ours_of(mark: str) -> list[psutil.Process]:
    """The processes of a program."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get(MARK) == mark]


def used(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Processor seconds, by process."""
    found = {}
    for each in processes:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            times = each.cpu_times()
            found[f"{title(each.pid)} {each.pid}"] = times.user + times.system
    return found


def seen(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def run(name: str, recipe: Recipe, options: argparse.Namespace, root: Path) -> Row:
    """Run a program to its end, or to a limit."""
    row: Row = {"program": name}
    begin, killed, mark = time.time(), None, uuid.uuid4().hex
    given = (recipe, options.gpus, options.port, root)
    with Watch(options.gpus).running() as watch, mock.patch.dict(os.environ, marked(mark)):
        try:
            program = our_program(*given) if name == "ours" else their_program(name, *given)
        except ValueError as error:
            return row | {"ended": str(error)}
        signal.alarm(options.limit)
        try:
            with ExitStack() as stack:
                with mock.patch.dict(os.environ, seen(program.engine_gpus)):
                    watch.url = stack.enter_context(program.engine())
                process = stack.enter_context(learner(program, watch.url, root / "learner.log"))
                done, last = 0, time.time()
                processes: list[psutil.Process] = []
                while process.poll() is None:
                    if (now := len(program.steps())) > done:
                        processes = processes or ours_of(mark)
                        done, last = now, time.time()
                        watch.processors.append((done, used(processes)))
                    if killed is None and 0 < options.kill <= done:
                        killed = time.time()
                        for pid in victims("VLLM::EngineCore", mark) or [process.pid]:
                            os.kill(pid, signal.SIGKILL)
                    if done and time.time() > last + options.patience:
                        raise OutOfTime(f"no step for {options.patience} s")
                    time.sleep(0.1)
                signal.alarm(0)  # what follows has limits of its own
                row["ended"] = reason(root / "learner.log", process.returncode)
                if name == "ours" and watch.url is not None:
                    row["round_s"] = round_parts(watch.url)
        except (OutOfTime, RuntimeError) as error:
            print(error, file=sys.stderr, flush=True)
            row["ended"] = str(error).strip().split("\n")[-1]
        finally:
            signal.alarm(0)
        if (began := program.began()) is not None:
            row |= {"start_s": began - begin} | figures(program.steps(), began, killed, options.goal, watch)
    return row


def figures(done: Sequence[Step], began: float, killed: float | None, goal: float, watch: Watch) -> Row:
    """What the steps and samples show."""
    row: Row = {"steps": len(done), "records": [asdict(each) for each in done]}
    for last in range(AT_GOAL, len(done) + 1):
        if fmean(each.reward for each in done[last - AT_GOAL : last]) >= goal:
            row |= {"to_goal_s": done[last - 1].ended - began, "steps_to_goal": last}
            break
    if killed is not None:
        after = [each.ended for each in done if each.ended > killed]
        row |= {"steps_after_kill": len(after)} | ({"outage_s": after[0] - killed} if after else {})
    rated = [each for each in done if killed is None or each.ended <= killed]
    if len(rated) < 2:
        return row
    first, end, rest = rated[0].ended, rated[-1].ended, rated[1:]
    tokens, made = sum(each.tokens for each in rest), watch.made(first, end)
    waits = [each.wait_s for each in rest if each.wait_s is not None]
    return row | {
        "last_reward": fmean(each.reward for each in done[-LAST:]),
        "step_s": median(after.ended - before.ended for before, after in pairwise(rated)),
        "tokens_per_s": tokens / (end - first) / max(1, len(watch.gpus)),
        "idle": watch.idle(first, end),
        "staleness": fmean(each.staleness for each in rest),
        "processor_ms": watch.processor_ms(),
        "update_s": median(each.update_s for each in rest),
        **({"wait_s": median(waits)} if waits else {}),
        **({"lost": max(0.0, 1 - tokens / made)} if made else {}),
    }


@contextmanager
def learner(program: Program, url: str | None, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | seen(program.learner_gpus) | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    command = program.command(url)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, process_group=0)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reason(log: Path, code: int) -> str:
    """Of a learner's end: its last line that names an error."""
    if code == 0:
        return ""
    lines = [each.strip() for each in log.read_text(errors="replace").split("\n") if each.strip()]
    errors = [each for each in lines if "Error" in each or "Exception" in each]
    return f"ended with {code}: {(errors or lines or ['no output'])[-1][:200]}"


class OutOfTime(KeyboardInterrupt):
    """As if by hand: `benchmarks.servers` prints the end of the engine's log."""


def expire(*_: Any) -> None:
    raise OutOfTime("not done within its limit of time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--gpus", nargs="*", default=[], help="one or two indices; none: on a CPU")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=16, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--goal", type=float, default=0.7, help="a mean reward")
    parser.add_argument("--kill", type=int, default=0, help="SIGKILL for the engine after this step")
    parser.add_argument("--limit", type=int, default=400, help="seconds for each program")
    parser.add_argument("--patience", type=int, default=90, help="seconds without a step")
    parser.add_argument("--port", type=int, default=8471)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where logs stay; default: nowhere")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, expire)
    rows: list[Row] = []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    given = ("steps", "groups", "answers", "max_tokens", "learning_rate", "max_staleness")
    for seed in options.seeds:
        recipe = Recipe(
            **{name: getattr(options, name) for name in given},
            model=str(resolve_model(options.model)),
            device="cuda" if options.gpus else "cpu",
            seed=seed,
        )
        for name in options.programs:
            with tempfile.TemporaryDirectory() as scratch:
                root = (options.logs or Path(scratch)) / f"{name}-{seed}"
                root.mkdir(parents=True)
                rows.append({"recipe": asdict(recipe), **run(name, recipe, options, root)})
            print(line(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"kill": options.kill, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
