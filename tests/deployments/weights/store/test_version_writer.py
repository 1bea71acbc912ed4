"""The background writer of trainers and replicas: what it writes, and what it reports."""

import gc
import logging
import re
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.protocol.poll import StoreResult, WriteVersion
from deployments.weights.store import version_writer
from deployments.weights.store.checkpoint_files import Checkpoint, check_files
from deployments.weights.store.hub import model_files, write_model_files
from deployments.weights.store.owner import OWNER
from deployments.weights.store.version_writer import (
    CommittedVersion,
    RetainedVersions,
    VersionWriter,
    write_safetensors,
    write_version,
)
from deployments.weights.store.versions import Store, StoredTensor
from deployments.weights.wire.chunk_layout import ReceivedChunk, plan_chunks
from deployments.weights.wire.digest import digest
from deployments.weights.wire.digest_definition import version_digest
from tests.tiny_models import save_tiny_llama, tiny_llama

TIMEOUT_S = 20.0


class Gate:
    """Writes no files, and does not return before it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, directory: Path) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


def no_files(directory: Path) -> None:
    pass


def version_of(number: int, tensors: dict[str, torch.Tensor] | None = None) -> CommittedVersion:
    if tensors is None:
        tensors = {"w": torch.full((2, 3), float(number))}
    return CommittedVersion(version=number, label=f"v{number}", tensors=tensors)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_written_version_is_a_checkpoint_that_transformers_loads(store: Store, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=1)
    tensors = {name: parameter.detach() for name, parameter in tiny_llama(7).named_parameters()}
    path = write_version(version_of(3, tensors), store, partial(write_model_files, model_files(model)))
    assert path == store.path_of(3)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, tensor in tensors.items():
        assert torch.equal(loaded.get_parameter(name), tensor)
    assert AutoTokenizer.from_pretrained(path).decode([5, 6])


def test_the_manifest_has_the_digests_of_what_was_written(store: Store) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "strided": torch.arange(6).reshape(2, 3).t()}
    version = CommittedVersion(version=3, label="step-3", tensors=tensors, trainer_step=30)
    loaded = load_file(write_version(version, store, no_files) / "model.safetensors")
    manifest = store.manifest_of(3)
    assert (manifest.version, manifest.label, manifest.trainer_step) == (3, "step-3", 30)
    assert manifest.tensors == {
        "w": StoredTensor(dtype="float32", shape=(2, 3), digest=f"{digest(loaded['w']):016x}"),
        "strided": StoredTensor(dtype="int64", shape=(3, 2), digest=f"{digest(loaded['strided']):016x}"),
    }


def test_a_stop_waits_for_a_version_whose_digest_is_being_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def slow(tensor: torch.Tensor) -> int:
        seen.extend(store.being_written())
        return digest(tensor)

    monkeypatch.setattr(version_writer, "digest", slow)
    write_version(version_of(3), store, no_files)
    assert seen == ["v00000003 (0.0 GB)"]


def with_drafter(number: int) -> CommittedVersion:
    tensors = {"w": torch.full((2, 3), float(number)), "drafter.d": torch.full((4,), float(number))}
    return version_of(number, tensors)


def drafter_of(store: Store, number: int) -> tuple[int | None, float]:
    """Its version by the manifest, and what is in the files, which are as the manifest says."""
    path = store.path_of(number)
    check_files(path, number)
    assert load_file(path / "model.safetensors").keys() == {"w"}
    assert store.manifest_of(number).tensors.keys() == {"w", "drafter.d"}
    drafter = load_file(path / "drafter" / "model.safetensors")
    return store.manifest_of(number).drafter, drafter["d"][0].item()


def test_a_version_is_stored_with_its_drafter_which_later_ones_keep(store: Store) -> None:
    for version in (version_of(1), with_drafter(3), version_of(4), version_of(6)):
        write_version(version, store, no_files)
    assert store.manifest_of(1).drafter is None
    assert [drafter_of(store, number) for number in (3, 4, 6)] == [(3, 3.0)] * 3
    assert version_digest(["w"], [digest(torch.full((2, 3), 4.0))]) == store.manifest_of(4).digest
    parts = Checkpoint.open(str(store.path_of(4)), [store.directory]).parts
    assert [part.names for part in parts] == [("w",), ("drafter.d",)]


def test_a_drafter_whose_version_was_not_written_is_stored_with_the_next(store: Store) -> None:
    gate = Gate()
    writer = VersionWriter(write_files=gate)
    writer.put(with_drafter(1), store)
    assert gate.entered.wait(TIMEOUT_S)
    for version in (with_drafter(2), version_of(3), version_of(4)):  # each replaces the one that waits
        writer.put(version, store)
    gate.opened.set()
    assert writer.wait(TIMEOUT_S)
    assert store.list() == [1, 4]
    assert (drafter_of(store, 1), drafter_of(store, 4)) == ((1, 1.0), (2, 2.0))


def test_a_drafter_that_could_not_be_stored_gives_way_to_a_newer_one_in_the_store(store: Store) -> None:
    writer = VersionWriter(write_files=no_files)
    store.directory.write_text("no directory")
    writer.put(with_drafter(1), store)
    assert writer.wait(TIMEOUT_S)
    store.directory.unlink()
    write_version(with_drafter(2), store, no_files)  # by another writer
    writer.put(version_of(3), store)
    assert writer.wait(TIMEOUT_S)
    assert drafter_of(store, 3) == (2, 2.0)


def test_multi_token_prediction_that_did_not_come_is_as_in_the_version_before(
    store: Store, tmp_path: Path
) -> None:
    """The checkpoint's until one came; a replica that retains a newer one than the store has stores it."""
    write_safetensors({"w": torch.zeros(2, 3), "mtp.d": torch.full((4,), 0.5)}, tmp_path / "m.safetensors")
    retained = RetainedVersions(frozenset({"mtp.d"}), tmp_path)

    def commit(number: int, *, drafter: bool) -> None:
        tensors = {"w": torch.full((2, 3), float(number))}
        arrive(retained, number, tensors | {"mtp.d": torch.full((4,), float(number))} if drafter else tensors)
        retained.commit()

    def stored(number: int) -> float:
        version = replace(retained.committed(wanted(number)), fleet_id=None)
        path = write_version(version, store, no_files)
        assert write_version(version, store, no_files) == path, "another writer's is the same"
        check_files(path, number)
        found = load_file(path / "model.safetensors")
        assert found["w"][0, 0].item() == number and not (path / "drafter").exists()
        assert store.manifest_of(number).tensors.keys() == found.keys()
        return found["mtp.d"][0].item()

    commit(1, drafter=False)
    assert stored(1) == 0.5
    trained = {"w": torch.full((2, 3), 2.0), "mtp.d": torch.full((4,), 2.0)}
    write_version(version_of(2, trained), store, no_files)
    commit(3, drafter=False)
    assert stored(3) == 2.0, "a trainer wrote version 2"
    commit(4, drafter=True)
    commit(5, drafter=False)
    assert stored(5) == 4.0, "version 4 was not stored"
    commit(6, drafter=True)
    assert stored(6) == 6.0
    retained.forget(6)
    commit(7, drafter=False)
    assert stored(7) == 6.0


def test_a_damaged_drafter_is_found(store: Store) -> None:
    path = write_version(with_drafter(3), store, no_files)
    write_safetensors({"d": torch.zeros(4)}, path / "drafter" / "model.safetensors")
    with pytest.raises(ValueError, match=r"version 3 in .* is damaged: 'drafter\.d' was written with digest"):
        check_files(path, 3)


def test_tensors_that_changed_after_their_commit_are_not_stored(store: Store) -> None:
    tensors = {name: torch.zeros(4) for name in ("a", "b", "c")}
    committed = version_digest(list(tensors), [digest(tensor) for tensor in tensors.values()])
    version = CommittedVersion(version=3, label=None, digest=committed, tensors=tensors)
    tensors["b"][3] = 1.0
    with pytest.raises(ValueError, match=f"version 3 was committed with digest {committed}, and its tensors"):
        write_version(version, store, no_files)
    assert list(store.list()) == []
    tensors["b"][3] = 0.0
    assert write_version(version, store, no_files) == store.path_of(3)


def test_version_of_another_fleet_in_the_store_is_a_problem(store: Store) -> None:
    mine, theirs = (
        CommittedVersion(version=1, label=None, fleet_id=fleet_id, tensors={"w": torch.ones(2)})
        for fleet_id in ("b", "a")
    )
    owner = store.directory / OWNER
    owner.parent.mkdir(parents=True, exist_ok=True)
    owner.write_text('{"fleet_id": "a"}')
    write_version(theirs, store, no_files)
    owner.write_text('{"fleet_id": "b"}')
    with pytest.raises(ValueError, match=r"of fleet a and with digest .*; this is of fleet b and has"):
        write_version(mine, store, no_files)


def test_a_version_that_is_read_stays_when_the_trainer_adds_its_steps(store: Store) -> None:
    """A replica of its host was first, and another one starts from what it has stored."""
    version = version_of(3)
    write_version(version, store, no_files)
    with store.reading(3):
        write_version(replace(version, trainer_step=7), store, no_files)
        assert store.manifest_of(3).trainer_step == 7 and not store.remove(3)
    assert store.remove(3)


def test_version_of_another_writer_stays_as_it_is(store: Store) -> None:
    """Its writer was lost before it could report it."""
    first = write_version(version_of(3), store, no_files)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert write_version(version_of(3), store, no_files) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    trained = replace(version_of(3), trainer_step=9)
    assert write_version(trained, store, no_files) == first
    assert store.manifest_of(3).trainer_step == 9, "a replica of the trainer's host had written it"


@pytest.mark.parametrize(
    "tensors",
    [{"w": torch.full((2, 3), 4.0)}, {"w": torch.full((6,), 3.0)}, {"other": torch.zeros(1)}],
    ids=["content", "shape", "name"],
)
def test_other_weights_of_the_same_version_are_a_problem(
    store: Store, caplog: pytest.LogCaptureFixture, tensors: dict[str, torch.Tensor]
) -> None:
    """The store of an older run whose journal is gone, or one that two fleets share."""
    results = list[StoreResult]()
    path = write_version(version_of(3), store, no_files)
    writer = VersionWriter(write_files=no_files, report=results.append)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        writer.put(version_of(3, tensors), store)
        assert writer.wait(TIMEOUT_S)
    assert writer.result is not None and (writer.newest, results) == (None, [writer.result])
    pattern = r"ValueError: version 3 is in the store already, of no fleet and with digest \w{32}; this is of"
    assert re.match(pattern, writer.result.problem), writer.result.problem
    (record,) = caplog.records
    assert record.getMessage() == f"version 3 could not be stored: {writer.result.problem}"
    assert not record.exc_info, "an expected fault has no stack trace"
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((2, 3), 3.0))


def test_put_returns_at_once_and_the_result_has_the_path(store: Store) -> None:
    gate, results = Gate(), list[StoreResult]()
    writer = VersionWriter(write_files=gate, report=results.append)
    assert writer.wait(0.0) and writer.result is None
    writer.put(version_of(3), store)
    assert gate.entered.wait(TIMEOUT_S)
    assert not writer.wait(0.0)
    assert (writer.result, writer.newest, results, list(store.list())) == (None, None, [], [])
    gate.opened.set()
    assert writer.wait(TIMEOUT_S)
    expected = StoreResult(version=3, label="v3", path=str(store.path_of(3)), problem="")
    assert (writer.result, writer.newest, results) == (expected, 3, [expected])


def test_waiting_version_is_replaced_by_a_newer_one(store: Store) -> None:
    gate = Gate()
    writer = VersionWriter(write_files=gate)
    writer.put(version_of(1), store)
    assert gate.entered.wait(TIMEOUT_S)
    for number in range(2, 6):
        writer.put(version_of(number), store)
    gate.opened.set()
    assert writer.wait(TIMEOUT_S)
    assert list(store.list()) == [1, 5]
    assert writer.newest == 5


def test_failed_write_is_reported_and_may_be_tried_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    failed: list[StoreResult] = []
    writer = VersionWriter(write_files=no_files, report=failed.append)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        writer.put(version_of(3), Store(tmp_path / "file" / "store"))
        assert writer.wait(TIMEOUT_S)
    result = writer.result
    assert result is not None and (result.version, result.path, writer.newest) == (3, "", None)
    assert result.problem.startswith("NotADirectoryError: ") and failed == [result]
    message = f"version 3 could not be stored: {result.problem}"
    assert {record.getMessage() for record in caplog.records} == {message}
    writer.put(version_of(3), store)
    assert writer.result is None or not writer.result.problem, "not that of the first attempt"
    assert writer.wait(TIMEOUT_S)
    assert writer.newest == 3 and writer.result is not None and not writer.result.problem


def test_a_version_that_could_not_be_reported_is_complete(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(result: StoreResult) -> None:
        raise TimeoutError("the controller does not answer")

    writer = VersionWriter(write_files=no_files, report=fail)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        writer.put(version_of(3), store)
        assert writer.wait(TIMEOUT_S)
    assert writer.newest == 3 and writer.result is not None and not writer.result.problem
    (record,) = caplog.records
    assert record.getMessage().endswith("version 3 was stored: the controller does not answer")


def test_the_next_version_does_not_wait_for_a_report_that_nobody_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a fleet is stopped, whose controller is gone first."""
    monkeypatch.setattr("deployments.weights.store.version_writer.REPORT_S", 0.05)
    asked, taken = threading.Event(), threading.Event()

    def report(result: StoreResult) -> None:
        asked.set()
        assert taken.wait(TIMEOUT_S)

    writer = VersionWriter(write_files=no_files, report=report)
    writer.put(version_of(3), store)
    assert asked.wait(TIMEOUT_S)
    writer.put(version_of(4), store)
    assert writer.wait(TIMEOUT_S / 2) and list(store.list()) == [3, 4]
    taken.set()


@pytest.mark.slow
def test_the_tensors_of_a_written_version_are_freed(store: Store) -> None:
    writer = VersionWriter(write_files=no_files)
    tensors = {"w": torch.zeros(4)}
    freed = weakref.ref(tensors["w"])
    writer.put(version_of(3, tensors), store)
    assert writer.wait(TIMEOUT_S)
    del tensors
    gc.collect()
    assert freed() is None


NUMBERS = torch.arange(7)
TENSORS = {
    "odd.bytes": NUMBERS.to(torch.uint8),
    "half": NUMBERS.to(torch.bfloat16).reshape(7, 1),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "fp8": NUMBERS.to(torch.float8_e4m3fn),
}


def test_safetensors_file_holds_every_dtype_and_layout(tmp_path: Path) -> None:
    tensors = TENSORS | {
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
    }
    write_safetensors(tensors, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].to(torch.float32).equal(tensor.to(torch.float32))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers requires it"


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'q' has dtype torch\.complex128, which safetensors cannot hold"):
        write_safetensors({"q": torch.empty(2, dtype=torch.complex128)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# -- what a replica retains -----------------------------------------------------------------------


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), float(seed)), "n": torch.tensor([seed])}


def arrive(
    retained: RetainedVersions, version: int | None, tensors: Mapping[str, torch.Tensor] | None = None
) -> Mapping[str, torch.Tensor]:
    """An update arrives; it is retained if it has a version."""
    tensors = tensors or tensors_of(7 if version is None else version)
    retained.begin(version)
    for name, tensor in tensors.items():
        (chunk,) = plan_chunks([(name, tensor.dtype, tuple(tensor.shape))], 1 << 20)
        retained.add(ReceivedChunk(chunk=chunk, memory_key=0, sent=None, read=partial(list, [tensor])))
    return tensors


def wanted(version: int, label: str | None = None) -> WriteVersion:
    return WriteVersion(version=version, label=label, fleet_id="f", digest=None)


def test_retained_version_has_its_tensors_until_it_is_forgotten() -> None:
    retained = RetainedVersions()
    tensors = arrive(retained, 3)
    retained.commit()
    version = retained.committed(wanted(3, "step-3"))
    assert (version.version, version.label, version.trainer_step) == (3, "step-3", None)
    assert version.tensors.keys() == tensors.keys()
    assert all(torch.equal(version.tensors[name], tensor) for name, tensor in tensors.items())
    retained.forget(2)
    assert retained.committed(wanted(3)).version == 3
    retained.forget(4)
    with pytest.raises(ValueError, match="the retained one is None"):
        retained.committed(wanted(3))


def test_a_drafter_is_retained_until_it_is_in_the_store(store: Store) -> None:
    """Also if the replica that began to write its version could not."""
    write_version(with_drafter(1), store, no_files)
    retained, writer = RetainedVersions(), VersionWriter(write_files=no_files)

    def commit(version: CommittedVersion) -> None:
        arrive(retained, version.version, version.tensors)
        retained.commit()

    def stored(number: int) -> tuple[int | None, float]:
        writer.put(replace(retained.committed(wanted(number)), fleet_id=None), store)
        assert writer.wait(TIMEOUT_S)
        return drafter_of(store, number)

    for version in (with_drafter(2), version_of(3), version_of(4)):
        commit(version)
    assert stored(4) == (2, 2.0)
    retained.forget(4)
    write_version(with_drafter(5), store, no_files)
    commit(version_of(6))
    assert retained.committed(wanted(6)).drafter is None
    assert stored(6) == (5, 5.0)


def test_dropped_update_is_not_retained() -> None:
    retained = RetainedVersions()
    arrive(retained, 3)
    retained.commit()
    arrive(retained, 4)
    retained.begin(None)  # the round was dropped
    with pytest.raises(ValueError, match="version 4 must be retained to be stored, the retained one is 3"):
        retained.committed(wanted(4))
    assert retained.committed(wanted(3)).version == 3


@pytest.mark.parametrize("newer", [4, None], ids=["retained", "not retained"])
def test_commit_replaces_the_retained_version(newer: int | None) -> None:
    retained = RetainedVersions()
    for version in (3, newer):
        arrive(retained, version)
        retained.commit()
    with pytest.raises(
        ValueError, match=f"version 3 must be retained to be stored, the retained one is {newer}"
    ):
        retained.committed(wanted(3))
    if newer is not None:
        assert torch.equal(retained.committed(wanted(newer)).tensors["n"], torch.tensor([newer]))
