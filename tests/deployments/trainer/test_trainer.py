"""The trainer deployment with real worker processes (Ray), a fake controller and a tiny model."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from safetensors.torch import load_file

from deployments.errors import FleetUnavailable, InvalidRequest, OtherStep, RoundAborted, TransferAborted
from deployments.trainer.spec import TrainerSpec, adapter_directory
from deployments.trainer.trainer import Trainer
from deployments.trainer.turns import Turns
from deployments.trainer.worker_group import WorkerGroup
from deployments.trainer_reports import AdapterReport
from tests.deployments.fake_controller import FakeController
from tests.deployments.trainer.lora.fake_adapter_controller import FakeAdapterController
from tests.deployments.trainer.trainer_specs import trainer_spec, with_config
from tests.tiny_models import save_tiny_llama
from trainers.lora import TENSORS
from trainers.settings import Strategy

pytestmark = [pytest.mark.serve, pytest.mark.asyncio]

BATCH: list[Any] = [
    {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-1.0, -1.0], "advantage": 1.0},
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    root = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": root}}
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    model = str(save_tiny_llama(tmp_path / "model", seed=0))
    return trainer_spec(model, tmp_path / "store")


@contextlib.asynccontextmanager
async def running(spec: TrainerSpec, controller: FakeController | None = None) -> Any:
    trainer = Trainer.__new__(Trainer)
    # The fake stands where a `UnaryHandle` does.
    with patch("deployments.trainer.trainer.UnaryHandle", lambda handle: handle):
        await trainer.__init__(  # type: ignore[misc]  # as Serve does it
            spec, FakeController() if controller is None else controller
        )
    try:
        yield trainer
    finally:
        await trainer.__del__()
        del trainer._group  # Python calls __del__ once more, without awaiting it


def exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


@ray.remote(num_cpus=0)
class SlowWorker:
    async def learn(self) -> str:
        await asyncio.sleep(1.0)
        return "learned"


@ray.remote(num_cpus=0)
class Turning:
    """A trainer whose step is a call of another actor."""

    def __init__(self, worker: Any) -> None:
        self._turns, self._worker, self.ended = Turns(), worker, ""

    async def step(self) -> None:
        await self._turns.take("step", self._learn)

    async def doing(self) -> str | None:
        return self._turns.doing

    async def how_it_ended(self) -> str:
        return self.ended

    async def _learn(self) -> None:
        try:
            self.ended = await self._worker.learn.remote()
        except BaseException as error:
            self.ended = type(error).__name__
            raise


async def test_when_ray_cancels_a_call_what_the_call_has_begun_goes_on() -> None:
    worker = SlowWorker.remote()
    trainer = Turning.remote(worker)
    step = trainer.step.remote()
    async with asyncio.timeout(30):
        while await trainer.doing.remote() != "step":
            await asyncio.sleep(0.05)
        ray.cancel(step)
        with pytest.raises(ray.exceptions.RayError):
            await step
        while not (ended := await trainer.how_it_ended.remote()):
            await asyncio.sleep(0.05)
    ray.kill(trainer)
    ray.kill(worker)
    assert ended == "learned"


async def until_gone(pids: list[int], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while any(exists(pid) for pid in pids):
            await asyncio.sleep(0.05)


async def until_stored(trainer: Trainer, version: int, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while (await trainer.status()).stored_version != version:
            await asyncio.sleep(0.05)


async def test_calls_take_turns_and_status_is_answered_meanwhile(spec: TrainerSpec) -> None:
    async with running(spec) as trainer:
        calls: list[Any] = [asyncio.ensure_future(trainer.step(BATCH)) for _ in range(3)]
        calls.append(asyncio.ensure_future(trainer.publish("after three")))
        await asyncio.sleep(0)  # the calls take their places
        status = asyncio.ensure_future(trainer.status())
        done, _ = await asyncio.wait([status, calls[-1]], return_when=asyncio.FIRST_COMPLETED)
        assert done == {status}
        assert status.result().doing is not None
        *steps, report = await asyncio.gather(*calls)
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert (report.version, report.label) == (1, "after three")
        after = await trainer.status()
        assert (after.step, after.version, after.doing, after.doing_s) == (3, 1, None, 0.0)
        assert (after.last_step, after.last_round) == (steps[-1], report)
        assert os.getpid() not in await trainer.process_ids()
        with pytest.raises(InvalidRequest, match="non-empty list"):
            await trainer.step([])
        await trainer.check_health()


async def test_a_stored_version_is_published_again_and_weights_are_saved_as_a_checkpoint(
    spec: TrainerSpec, tmp_path: Path
) -> None:
    controller = FakeController()
    async with running(spec, controller) as trainer:
        await trainer.step(BATCH)
        await trainer.publish()
        await until_stored(trainer, 1)
        # The worker has reported it to its own copy of the fake.
        controller.stored_versions[1] = str(tmp_path / "store" / "v00000001")
        report = await trainer.rollback(1)
        assert (report.version, report.label) == (2, "rollback to 1")
        with pytest.raises(InvalidRequest, match="version 9 is not in the store"):
            await trainer.rollback(9)
        saved = await trainer.save(str(tmp_path / "saved"))
        assert (saved.path, saved.step) == (str(tmp_path / "saved"), 1)
        assert (tmp_path / "saved" / "model.safetensors").is_file()


async def test_a_dead_worker_fails_the_health_check_and_the_next_trainer_resumes(spec: TrainerSpec) -> None:
    async with running(spec) as trainer:
        await trainer.step(BATCH)
        await trainer.publish(None)
        await until_stored(trainer, 1)
        (pid,) = await trainer.process_ids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(FleetUnavailable, match="rank 0 of the trainer died during 'step'"):
            await trainer.step(BATCH)
        with pytest.raises(RuntimeError, match="worker group is broken"):
            await trainer.check_health()
    async with running(spec) as trainer:
        assert ((status := await trainer.status()).version, status.step) == (1, 1)
        with pytest.raises(OtherStep, match="expected a trainer after step 2, got one after step 1"):
            await trainer.publish("step 2", 2)  # which died with the worker
        assert (await trainer.publish("step 1", 1)).label == "step 1"


@pytest.mark.parametrize(("strategy", "ranks"), [(Strategy.SINGLE, 1), (Strategy.FSDP2, 2)])
async def test_a_round_whose_transfer_broke_is_sent_again_by_all_ranks(
    spec: TrainerSpec, strategy: Strategy, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    controller = FakeController()
    controller.abort_next = TransferAborted("r0 is gone", {"send_again": True})
    async with running(with_config(spec, strategy=strategy, world_size=ranks), controller) as trainer:
        with caplog.at_level("WARNING", "ray.serve"):
            report = await trainer.publish("second try")
        assert (report.version, report.label) == (1, "second try")
        assert [each.getMessage() for each in caplog.records].count(
            "the round is sent again, to the replicas that are left: r0 is gone"
        ) == 1
        assert (await trainer.publish(None)).version == 2


@pytest.mark.parametrize(
    "method", ["fleet", "acquire", "connect", "open_round", "send", "close_round", "release"]
)
async def test_a_publish_survives_a_controller_that_dies_in_any_of_its_calls(
    spec: TrainerSpec, method: str, tmp_path: Path
) -> None:
    controller = FakeController()
    controller.dies_in[method] = "after"
    async with running(spec, controller) as trainer:
        report = await trainer.publish("mine")
        assert (report.version, report.label) == (1, "mine")
        await until_stored(trainer, 1)


@pytest.mark.parametrize(("strategy", "ranks"), [(Strategy.SINGLE, 1), (Strategy.FSDP2, 2)])
async def test_an_adapter_is_trained_published_and_resumed(
    spec: TrainerSpec, strategy: Strategy, ranks: int, tmp_path: Path
) -> None:
    lora = {"name": "math", "rank": 4}
    spec = with_config(spec, lora=lora, strategy=strategy, world_size=ranks)
    # Rank 0 publishes to its own copy of the fake, which no successor knows.
    controller = FakeAdapterController(Path(spec.store_dir), adapter_directory(spec.store_dir))
    async with running(spec, controller) as trainer:
        assert (await trainer.step(BATCH))["step"] == 1
        report = await trainer.publish("first")
        assert isinstance(report, AdapterReport)
        assert (report.name, report.version, report.label, report.step) == ("math", 1, "first", 1)
        status = await trainer.status()
        assert (status.adapter, status.adapter_version, status.last_adapter) == ("math", 1, report)
        assert (status.version, status.last_round) == (0, None)
        with pytest.raises(InvalidRequest, match="trains the adapter 'math'"):
            await trainer.rollback(1)
        await trainer.save(str(tmp_path / "a"))
        saved = load_file(tmp_path / "a" / TENSORS)
    async with running(spec, controller) as trainer:
        status = await trainer.status()
        assert (status.step, status.adapter_version, status.last_adapter) == (1, 0, None)
        await trainer.save(str(tmp_path / "b"))
        again = load_file(tmp_path / "b" / TENSORS)
        assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
        assert (await trainer.publish(None)).version == 1


async def test_a_round_that_was_aborted_for_another_reason_is_not_sent_again(spec: TrainerSpec) -> None:
    controller = FakeController()
    controller.abort_next = RoundAborted("replicas disagree")
    async with running(spec, controller) as trainer:
        with pytest.raises(RoundAborted, match="replicas disagree"):
            await trainer.publish(None)


async def test_an_orderly_end_leaves_no_process(spec: TrainerSpec) -> None:
    async with running(spec) as trainer:
        pids = await trainer.process_ids()
        assert all(exists(pid) for pid in pids)
    await until_gone(pids)


async def test_workers_end_with_the_process_that_owns_them(spec: TrainerSpec) -> None:
    class Owner:
        async def start(self, spec: TrainerSpec) -> list[int]:
            self.group, _ = await WorkerGroup.start(spec, FakeController())
            return [os.getpid(), *await self.group.process_ids()]

    owner = ray.remote(num_cpus=0)(Owner).remote()
    own, *workers = await owner.start.remote(spec)
    assert workers and all(exists(pid) for pid in workers)
    os.kill(own, signal.SIGKILL)
    await until_gone(workers)


async def test_a_step_whose_caller_is_gone_is_done_and_counted(spec: TrainerSpec) -> None:
    async with running(spec) as trainer:
        step = asyncio.ensure_future(trainer.step(BATCH))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert (await trainer.step(BATCH))["step"] == 2
        assert (await trainer.status()).step == 2


async def test_a_worker_that_hangs_is_found_and_ends_with_its_trainer(spec: TrainerSpec) -> None:
    async with running(spec) as trainer:
        (pid,) = await trainer.process_ids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="rank 0 has not answered for 20 s"):
            await trainer.check_health()
        with pytest.raises(FleetUnavailable, match="rank 0 has not answered"):
            await trainer.step(BATCH)
    await until_gone([pid])
