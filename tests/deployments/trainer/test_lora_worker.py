"""One rank that trains an adapter, without Ray and without a fleet: what is published and resumed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.errors import Conflict, FleetUnavailable, InvalidRequest
from deployments.ledger.adapters.catalog import named
from deployments.trainer.lora.sender import FileSource, adapter_sender
from deployments.trainer.lora.worker import LoraWorker
from deployments.trainer.messages import LoadedTrainer
from deployments.trainer.spec import TrainerSpec, adapter_directory
from deployments.trainer_reports import AdapterReport
from tests.deployments.trainer.fake_adapter_controller import FakeAdapterController
from tests.deployments.trainer.one_worker import BATCH, equal, small_spec
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_adapters import save_tiny_adapter

pytestmark = pytest.mark.timeout(300)
TENSORS = "adapter_model.safetensors"


def lora(**changes: Any) -> dict[str, Any]:
    return {"name": "math", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]} | changes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The operations are tiny: threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return with_config(small_spec(tmp_path), lora=lora())


@pytest.fixture
def controller(spec: TrainerSpec, tmp_path: Path) -> FakeAdapterController:
    users = tmp_path / "users"
    return FakeAdapterController(Path(spec.store_dir), adapter_directory(spec.store_dir), users)


def started(spec: TrainerSpec, controller: FakeAdapterController) -> LoraWorker:
    worker = LoraWorker(spec, 0, controller)  # type: ignore[arg-type]
    worker.load(("127.0.0.1", 0))
    return worker


def published(worker: LoraWorker, label: str | None = None) -> AdapterReport:
    report = worker.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


def trained(spec: TrainerSpec, controller: FakeAdapterController, steps: int = 2) -> LoraWorker:
    worker = started(spec, controller)
    for _ in range(steps):
        worker.step(BATCH)
        worker.publish(None)
    return worker


def saved(worker: LoraWorker, directory: Path) -> dict[str, torch.Tensor]:
    worker.save(str(directory))
    return load_file(directory / TENSORS)


def state_file(spec: TrainerSpec) -> Path:
    [found] = (Path(spec.store_dir).parent / "trainer").glob("lora-*/trainer_state.rank0.pt")
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ray.serve"]


def test_what_is_published_is_the_adapter_alone(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path
) -> None:
    worker = started(spec, controller)
    assert worker.step(BATCH)["step"] == 1
    report = published(worker, "first")
    assert (report.name, report.version, report.label, report.step) == ("math", 1, "first", 1)
    assert (report.base_version, controller.version) == (0, 0), "the base stays"
    assert controller.live == ["math@1"]
    assert equal(load_file(controller.files("math") / TENSORS), saved(worker, tmp_path / "saved"))
    assert "open_round" not in controller.calls and controller.lease is None, (
        "no round, and others may publish"
    )
    assert not list(adapter_directory(spec.store_dir).iterdir()), "the fleet has its own copy"
    assert not list(Path(spec.store_dir).glob("v*")), "the base is not stored again"
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj", "v_proj"])


def test_the_replicas_receive_the_bytes_that_the_store_keeps(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = started(spec, controller)
    for count in (1, 2, 3):
        worker.step(BATCH)
        report = published(worker)
        assert report.transfer_s is not None and len(controller.sent) == count
        files, load_id = controller.files("math"), named(controller.catalog, "math")[-1].load_id
        assert controller.sent[load_id] == {each.name: each.read_bytes() for each in files.iterdir()}
    assert controller.calls.count("connect") == 1 and controller.lease is None
    controller.epoch += 1  # a replica joined
    assert published(worker).transfer_s is not None and controller.calls.count("connect") == 2


def test_a_connection_is_for_files_of_one_size(tmp_path: Path) -> None:
    source = FileSource()
    assert source.read(save_tiny_adapter(tmp_path / "a", 1))
    source.forget()
    assert not source.read(save_tiny_adapter(tmp_path / "b", 2))
    assert source.read(save_tiny_adapter(tmp_path / "c", 1, lora_alpha=1234567))


def test_the_connection_of_another_publisher_is_left_to_it(
    spec: TrainerSpec, controller: FakeAdapterController, caplog: pytest.LogCaptureFixture
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    controller.connected_to = "somebody else"
    with caplog.at_level("WARNING", "ray.serve"):
        assert published(worker).transfer_s is None and controller.live == ["math@1"]
    assert "'somebody else' is connected" in lines(caplog)[-1] and "connect" not in controller.calls


@pytest.mark.parametrize("method", ["acquire", "connect", "send_adapter", "release"])
@pytest.mark.parametrize("fate", ["fails", "before", "after"])
def test_a_transfer_that_fails_costs_the_transfer_and_not_the_publish(
    spec: TrainerSpec,
    controller: FakeAdapterController,
    method: str,
    fate: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    with caplog.at_level("WARNING", "ray.serve"), monkeypatch.context() as patch:
        if fate == "fails":

            def fail(*args: Any) -> None:
                raise Conflict("not now")

            patch.setattr(controller, f"on_{method}", fail)
        else:
            controller.dies_in[method] = fate
        report = published(worker)
    assert report.version == 1 and controller.live == ["math@1"]
    failures = [each for each in lines(caplog) if "its transfer over 'shm' failed" in each]
    assert len(failures) == (report.transfer_s is None)
    if method in ("connect", "send_adapter"):  # others are asked again, or matter to nobody
        assert report.transfer_s is None
    assert published(worker).transfer_s is not None, "the next one is sent again"


@pytest.mark.parametrize(("transport", "ranks", "native"), [("ipc", 2, False), ("nccl", 1, True)])
def test_where_no_rank_reaches_all_replicas_they_read_the_store(
    spec: TrainerSpec, controller: FakeAdapterController, transport: str, ranks: int, native: bool
) -> None:
    config = spec.config.model_copy(update={"world_size": ranks})
    other = replace(spec, transport=transport, native=native, config=config)
    assert adapter_sender(other, controller) is None  # type: ignore[arg-type]


def test_a_publish_of_the_same_adapter_is_another_version(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    assert (published(worker).version, published(worker).version) == (1, 2)
    one, two = (load_file(Path(each.path) / TENSORS) for each in controller.catalog.live)
    assert equal(one, two)


@pytest.mark.parametrize(("fate", "expected"), [("before", "math@1"), ("after", "math@1")])
@pytest.mark.parametrize("method", ["load_adapter", "adapters", "fleet"])
def test_a_publish_survives_a_controller_that_dies_in_any_of_its_calls(
    spec: TrainerSpec, controller: FakeAdapterController, method: str, fate: Any, expected: str
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    controller.dies_in[method] = fate
    report = published(worker)
    assert f"{report.name}@{report.version}" == expected and controller.live == [expected]


def test_a_controller_that_does_not_answer_is_said_to(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = started(spec, controller)
    controller.takes_s["load_adapter"] = 1e6
    with pytest.raises(FleetUnavailable, match="has not answered 'load_adapter' within 300 s"):
        worker.publish(None)
    assert not list(adapter_directory(spec.store_dir).iterdir())


def test_a_name_that_somebody_else_has_loaded_is_not_taken(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path
) -> None:
    worker = trained(spec, controller, 1)
    foreign = save_tiny_adapter(tmp_path / "users" / "a", 1)
    controller.on_load_adapter("math", str(foreign), True)
    with pytest.raises(Conflict, match="math@2 was not published by this fleet's trainer: unload it"):
        worker.publish(None)
    assert controller.live == ["math@1", "math@2"]
    controller.on_unload_adapter("math@2")
    assert published(worker).version == 3


def test_a_trainer_starts_beside_a_name_that_somebody_else_has_loaded(
    spec: TrainerSpec,
    controller: FakeAdapterController,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller.on_load_adapter("math", str(save_tiny_adapter(tmp_path / "users" / "a", 1)), True)
    with caplog.at_level("WARNING", "ray.serve"):
        worker = started(spec, controller)
    assert lines(caplog)[0].startswith("math@1 was not published by this trainer")
    with pytest.raises(Conflict, match="math@1 was not published"):
        worker.publish(None)


def test_what_the_replicas_reject_is_an_error_and_leaves_nothing(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = trained(spec, controller, 1)
    controller.refusal = InvalidRequest("r0: rank 4, expected at most 2")
    with pytest.raises(InvalidRequest, match="rank 4"):
        worker.publish(None)
    assert controller.live == ["math@1"]
    assert not list(adapter_directory(spec.store_dir).iterdir())
    assert published(worker).version == 3


def test_a_full_disk_is_an_error_and_the_fleet_stays_as_it_was(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = trained(spec, controller, 1)
    directory = adapter_directory(spec.store_dir)
    directory.rmdir()
    directory.write_text("a file where the directory was to be")
    with pytest.raises(Conflict, match=r"the adapter 'math' is not published: .*Not a directory"):
        worker.publish(None)
    assert controller.live == ["math@1"]
    directory.unlink()
    assert published(worker).version == 2


def test_an_adapter_of_another_base_is_not_published(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = trained(spec, controller, 1)
    controller.version = 3
    with pytest.raises(Conflict, match="was trained on version 0, and the fleet serves version 3"):
        worker.publish(None)
    assert controller.live == ["math@1"]


def test_files_that_a_killed_trainer_left_go(spec: TrainerSpec, controller: FakeAdapterController) -> None:
    left = adapter_directory(spec.store_dir) / ".step-000001.partial"
    left.mkdir(parents=True)
    started(spec, controller)
    assert not left.exists()


# -- restarts -------------------------------------------------------------------------------------------


def test_a_restarted_trainer_goes_on_exactly(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path
) -> None:
    spec = with_config(spec, wire_dtype="bfloat16")
    straight = trained(spec, controller)
    resumed = LoraWorker(spec, 0, controller)  # type: ignore[arg-type]
    parameters = sum(tensor.numel() for tensor in saved(straight, tmp_path / "straight").values())
    assert resumed.load(("", 0)) == LoadedTrainer(version=0, step=2, parameters=parameters, adapter_version=2)
    assert equal(saved(resumed, tmp_path / "resumed"), load_file(tmp_path / "straight" / TENSORS))
    assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert equal(saved(resumed, tmp_path / "r"), saved(straight, tmp_path / "s"))
    assert published(resumed).version == 3


def test_a_trainer_that_was_lost_before_the_fleet_had_its_adapter_goes_on_with_it(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path
) -> None:
    worker = trained(spec, controller, 1)
    worker.step(BATCH)
    controller.refusal = Conflict("in the middle")
    with pytest.raises(Conflict):
        worker.publish(None)
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "lost"))
    assert published(resumed).step == 2 and controller.live[0] == "math@1"


def test_a_state_that_was_not_written_costs_the_moments_and_not_the_weights(
    spec: TrainerSpec,
    controller: FakeAdapterController,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = trained(spec, controller, 1)
    state_file(spec).with_suffix(".partial").symlink_to("/dev/full")
    worker.step(BATCH)
    with caplog.at_level("INFO", "ray.serve"):
        assert published(worker).version == 2
        resumed = started(spec, controller)
    first, second = lines(caplog)[-2:]
    assert first.startswith("the state of the adapter 'math' at step 2 is not saved")
    assert second == (
        "the trainer trains the adapter 'math', from step 2; weights as published, moments of step 1"
    )
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "before"))


@pytest.mark.parametrize("damage", [b"", b"not a state"])
def test_a_damaged_state_costs_the_moments_and_not_the_weights(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path, damage: bytes
) -> None:
    worker = trained(spec, controller, 2)
    state_file(spec).write_bytes(damage)
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "before"))
    assert resumed.step(BATCH)["step"] == 3


def test_an_unloaded_adapter_is_published_again_from_where_it_was(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    trained(spec, controller)
    controller.on_unload_adapter("math")
    resumed = started(spec, controller)
    report = published(resumed)
    assert (report.version, report.step) == (3, 2) and controller.live == ["math@3"]


def test_an_adapter_is_not_continued_with_other_settings(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    trained(spec, controller, 1)
    with pytest.raises(ValueError, match=r"is the state of another adapter: .*choose another 'trainer.lora"):
        started(with_config(spec, lora=lora(rank=2)), controller)
    with pytest.raises(ValueError, match=r"'alpha' must be 4\.0, got 8\.0"):
        started(with_config(spec, lora=lora(alpha=4)), controller)
    state_file(spec).unlink()
    with pytest.raises(
        ValueError, match="version 1 of the adapter is live, and is not one of this trainer's"
    ):
        started(with_config(spec, lora=lora(alpha=4)), controller)
    other = started(with_config(spec, lora=lora(rank=2, name="code")), controller)
    assert published(other).version == 1 and controller.live == ["math@1", "code@1"]


def test_a_model_without_the_modules_is_refused(spec: TrainerSpec, controller: FakeAdapterController) -> None:
    with pytest.raises(ValueError, match=r"'trainer.lora.target_modules': expected .*q_proj.*, got 'c_attn'"):
        started(with_config(spec, lora=lora(target_modules=["c_attn"])), controller)


def test_a_bad_batch_is_refused_and_changes_nothing(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = started(spec, controller)
    with pytest.raises(InvalidRequest, match="non-empty list"):
        worker.step([])
    assert worker.step(BATCH)["step"] == 1


def test_a_rank_that_comes_after_rank_0_has_saved_does_not_refuse_the_directory(
    spec: TrainerSpec, controller: FakeAdapterController, tmp_path: Path
) -> None:
    first = started(spec, controller)
    last = LoraWorker(spec, 1, controller)  # type: ignore[arg-type]
    assert first.save(str(tmp_path / "saved")) is not None
    assert last.save(str(tmp_path / "saved")) is None


def test_an_adapter_is_saved_beside_the_store_and_not_just_anywhere(
    spec: TrainerSpec, controller: FakeAdapterController
) -> None:
    worker = started(with_config(spec, checkpoint_every=0), controller)
    report = worker.save(None)
    assert report is not None, "rank 0 has the report"
    path = Path(report.path)
    assert path.parent == Path(spec.store_dir).parent and path.name.endswith("-000000")
    for wrong in ("relative", "/proc/1/x/y"):
        with pytest.raises(InvalidRequest, match="path must be"):
            worker.save(wrong)
