import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
import ray
import torch
from safetensors.torch import load_file

from deployments.protocol import errors
from deployments.protocol.responses import AdapterReport
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import Trainer
from tests.deployments.on_ray.trainer_actors import Controllers, Owner, RemoteController
from tests.deployments.trainer.trainer_specs import trainer_spec, with_config
from tests.tiny_models import save_tiny_llama
from trainers.lora import TENSORS
from trainers.settings import Strategy

pytestmark = [pytest.mark.serve, pytest.mark.fleet("ray"), pytest.mark.asyncio(loop_scope="module")]

BATCH: list[Any] = [
    {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-1.0, -1.0], "advantage": 1.0}
]
PING_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def controllers(cluster: None) -> Any:
    return ray.remote(num_cpus=0)(Controllers).remote()


def spec_in(directory: Path) -> TrainerSpec:
    return trainer_spec(str(save_tiny_llama(directory / "model", seed=0)), directory / "store")


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return spec_in(tmp_path)


@pytest.fixture
def controller(controllers: Any, tmp_path: Path) -> Iterator[RemoteController]:
    yield RemoteController(controllers, tmp_path)
    ray.get(controllers.close.remote(tmp_path))


@contextlib.asynccontextmanager
async def running(spec: TrainerSpec, controller: RemoteController) -> AsyncIterator[Trainer]:
    trainer = Trainer.__new__(Trainer)
    with patch("deployments.trainer.trainer.CallHandle", lambda handle: handle):
        await trainer.__init__(spec, controller, ping_timeout_s=PING_TIMEOUT_S)  # type: ignore[misc]  # as Serve does
    try:
        yield trainer
    finally:
        await trainer.__del__()
        del trainer._group  # Python calls __del__ once more, without awaiting it


@pytest.fixture(scope="module")
def fleet(controllers: Any, tmp_path_factory: pytest.TempPathFactory) -> RemoteController:
    """The controller of `trainer`."""
    return RemoteController(controllers, tmp_path_factory.mktemp("fleet"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(fleet: RemoteController) -> AsyncIterator[Trainer]:
    """With one worker, for all tests that kill nothing."""
    async with running(spec_in(fleet.directory), fleet) as trainer:
        yield trainer


def exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


async def until_gone(pids: list[int], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while any(exists(pid) for pid in pids):
            await asyncio.sleep(0.05)


async def until_stored(trainer: Trainer, version: int, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while (await trainer.status()).stored_version != version:
            await asyncio.sleep(0.05)


async def test_calls_take_turns_and_status_is_answered_meanwhile(trainer: Trainer) -> None:
    before = await trainer.status()
    calls: list[Any] = [asyncio.ensure_future(trainer.step(BATCH)) for _ in range(3)]
    calls.append(asyncio.ensure_future(trainer.publish("after three")))
    await asyncio.sleep(0)  # the calls take their places
    status = asyncio.ensure_future(trainer.status())
    done, _ = await asyncio.wait([status, calls[-1]], return_when=asyncio.FIRST_COMPLETED)
    assert done == {status}
    assert status.result().doing is not None
    *steps, report = await asyncio.gather(*calls)
    assert [step["step"] - before.step for step in steps] == [1, 2, 3]
    assert (report.version, report.label) == (before.version + 1, "after three")
    after = await trainer.status()
    assert (after.step, after.version) == (before.step + 3, report.version)
    assert (after.doing, after.doing_s) == (None, 0.0)
    assert (after.last_step, after.last_round) == (steps[-1], report)
    assert os.getpid() not in await trainer.process_ids()
    with pytest.raises(errors.InvalidRequest, match="non-empty list"):
        await trainer.step([])
    await trainer.check_health()


async def test_a_round_that_was_aborted_for_another_reason_is_not_sent_again(
    trainer: Trainer, fleet: RemoteController
) -> None:
    await fleet.do(
        lambda controller: controller.fails.update(close_round=errors.RoundAborted("replicas disagree"))
    )
    with pytest.raises(errors.RoundAborted, match="replicas disagree"):
        await trainer.publish(None)


async def test_a_round_whose_transfer_broke_is_sent_again_by_all_ranks_and_a_rank_that_hangs_is_found(
    spec: TrainerSpec, controller: RemoteController, caplog: pytest.LogCaptureFixture
) -> None:
    lost = errors.TransferAborted("r0 is gone", {"send_again": True})
    async with running(with_config(spec, strategy=Strategy.FSDP2, world_size=2), controller) as trainer:
        await controller.do(lambda controller: controller.fails.update(close_round=lost))
        with caplog.at_level("WARNING", "ray.serve"):
            report = await trainer.publish("second try")
        assert (report.version, report.label) == (1, "second try")
        assert [each.getMessage() for each in caplog.records].count(
            "sending the round again, to the remaining replicas: r0 is gone"
        ) == 1
        assert (await trainer.publish(None)).version == 2

        pids = await trainer.process_ids()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="rank 1 has not answered for 3 s"):
            await trainer.check_health()
        with pytest.raises(errors.FleetUnavailable, match="rank 1 has not answered"):
            await trainer.step(BATCH)
    await until_gone(pids)


async def test_a_dead_worker_fails_the_health_check_and_the_next_trainer_resumes_and_leaves_no_process(
    spec: TrainerSpec, controller: RemoteController
) -> None:
    async with running(spec, controller) as trainer:
        step = await trainer.step(BATCH, done=0, label="run/1")
        report = await trainer.publish("run/1", 1)
        assert await trainer.step(BATCH, done=0, label="run/1") == step, "a call that comes twice"
        assert await trainer.publish("run/1", 1) == report
        await until_stored(trainer, 1)
        (pid,) = await trainer.process_ids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(errors.FleetUnavailable, match="rank 0 of the trainer died during 'step'"):
            await trainer.step(BATCH)
        with pytest.raises(RuntimeError, match="worker group is broken"):
            await trainer.check_health()
    async with running(spec, controller) as trainer:
        assert ((status := await trainer.status()).version, status.step) == (1, 1)
        assert await trainer.step(BATCH, done=1, label="run/1") == {"step": 1}
        with pytest.raises(errors.OtherStep, match="expected a trainer after step 2, got one after step 1"):
            await trainer.publish("step 2", 2)  # which died with the worker
        assert (await trainer.publish("run/1", 1)).version == 1, "as its predecessor has answered"
        pids = await trainer.process_ids()
        assert all(exists(pid) for pid in pids)
    await until_gone(pids)


async def test_a_trainer_without_the_committed_version_does_nothing_until_it_is_told(
    spec: TrainerSpec, controller: RemoteController
) -> None:
    async with running(spec, controller) as trainer:
        for version in (1, 2):
            await trainer.step(BATCH, label=f"run/{version}")
            await trainer.publish(f"run/{version}")
            await until_stored(trainer, version)
    (controller.directory / "store" / "v00000002" / "model.safetensors").write_bytes(b"")
    async with running(spec, controller) as trainer:
        missed = (await trainer.status()).missed
        assert missed is not None
        for refused in (trainer.step(BATCH), trainer.publish(None)):
            with pytest.raises(
                errors.Conflict, match="the trainer has version 1, and version 2 is committed"
            ) as raised:
                await refused
            assert raised.value.message == missed
        assert (await trainer.rollback(1)).version == 3
        await trainer.step(BATCH, label="run/2")  # which the rollback has undone
        assert (await trainer.publish("run/2", 2)).version == 4
        status = await trainer.status()
        assert (status.version, status.step, status.missed) == (4, 2, None)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(Strategy.SINGLE, 1), pytest.param(Strategy.FSDP2, 2, marks=pytest.mark.long)]
)
async def test_an_adapter_is_trained_published_and_resumed(
    spec: TrainerSpec, controller: RemoteController, strategy: Strategy, ranks: int, tmp_path: Path
) -> None:
    lora = {"name": "math", "rank": 4}
    spec = with_config(spec, lora=lora, strategy=strategy, world_size=ranks)
    async with running(spec, controller) as trainer:
        assert (await trainer.step(BATCH))["step"] == 1
        report = await trainer.publish("first")
        assert isinstance(report, AdapterReport)
        assert (report.name, report.version, report.label, report.step) == ("math", 1, "first", 1)
        status = await trainer.status()
        assert (status.adapter, status.adapter_version, status.last_adapter) == ("math", 1, report)
        assert (status.version, status.last_round) == (0, None)
        with pytest.raises(errors.InvalidRequest, match="trains the adapter 'math'"):
            await trainer.rollback(1)
        await trainer.save(str(tmp_path / "a"))
        saved = load_file(tmp_path / "a" / TENSORS)
    async with running(spec, controller) as trainer:
        status = await trainer.status()
        assert (status.step, status.adapter_version, status.last_adapter) == (1, 1, None)
        await trainer.save(str(tmp_path / "b"))
        again = load_file(tmp_path / "b" / TENSORS)
        assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
        assert (await trainer.publish(None)).version == 2


async def test_workers_end_with_the_process_that_owns_them(
    spec: TrainerSpec, controller: RemoteController
) -> None:
    owner = ray.remote(num_cpus=0)(Owner).remote()
    own, *workers = await owner.start.remote(spec, controller)
    assert workers and all(exists(pid) for pid in workers)
    os.kill(own, signal.SIGKILL)
    await until_gone(workers)
