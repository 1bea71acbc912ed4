import errno
import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deployments.weights.store.adapter_store import (
    CONFIG,
    PART_BYTES,
    TENSORS,
    AdapterStore,
    CannotWrite,
    Incomplete,
    adapter_digest,
    digest_of,
)
from tests.full_disk import full_disk
from tests.tiny_adapters import save_tiny_adapter


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store" / "adapters")


def test_a_copy_does_not_change_with_its_source(store: AdapterStore, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    files = store.copy(source, [tmp_path], 7)
    assert adapter_digest(Path(files.path)) == files.digest, "replicas read it while it is being synced"
    store.complete(7)
    assert adapter_digest(Path(files.path)) == files.digest == adapter_digest(source)
    save_tiny_adapter(tmp_path / "a", 2)
    assert adapter_digest(Path(files.path)) == files.digest != adapter_digest(source)
    assert store.ids() == [7]
    store.remove(7)
    assert store.ids() == []


def test_files_with_a_stated_digest_are_hard_linked(store: AdapterStore, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    stated = digest_of({name: (source / name).read_bytes() for name in (CONFIG, TENSORS)})
    assert stated == adapter_digest(source)
    files = store.copy(source, [tmp_path], 7, stated)
    assert (source / TENSORS).samefile(Path(files.path) / TENSORS) and files.digest == stated
    store.complete(7)
    shutil.rmtree(source)
    assert adapter_digest(Path(files.path)) == stated
    assert files.size_bytes == (Path(files.path) / TENSORS).stat().st_size


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 3 * PART_BYTES + 7])
def test_a_digest_is_of_every_part_in_its_place(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / CONFIG).write_bytes(b"{}")
    (tmp_path / TENSORS).write_bytes(content)
    digest = adapter_digest(tmp_path)
    assert digest == digest_of({CONFIG: b"{}", TENSORS: content})
    others = {content[PART_BYTES:] + content[:PART_BYTES], content[:-1], content + b"\0"} - {content}
    assert all(digest_of({CONFIG: b"{}", TENSORS: other}) != digest for other in others)


def test_copy_to_a_full_disk_raises_cannot_write(store: AdapterStore, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    with full_disk((source / TENSORS).stat().st_size - 5), pytest.raises(CannotWrite):
        store.copy(source, [tmp_path], 7)
    assert store.ids() == []


@pytest.mark.parametrize("refused", [CONFIG, TENSORS])
def test_files_are_copied_without_hard_links(
    store: AdapterStore, tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, link = save_tiny_adapter(tmp_path / "a", 1), os.link

    def refuse(file: Path, to: Path) -> None:
        if file.name == refused:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(file, to)

    monkeypatch.setattr(os, "link", refuse)
    files = store.copy(source, [tmp_path], 7, adapter_digest(source))
    assert not any((source / name).samefile(Path(files.path) / name) for name in (CONFIG, TENSORS))
    assert adapter_digest(Path(files.path)) == files.digest == adapter_digest(source)


@pytest.mark.parametrize("damage", ["gone", "short", "outside"])
def test_a_stated_digest_does_not_replace_the_checks(
    store: AdapterStore, tmp_path: Path, damage: str
) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    stated, root = adapter_digest(source), tmp_path / "other" if damage == "outside" else tmp_path
    if damage == "gone":
        (source / TENSORS).unlink()
    elif damage == "short":
        os.truncate(source / TENSORS, 100)
    with pytest.raises(ValueError, match="checkpoint_roots" if damage == "outside" else "exist|header"):
        store.copy(source, [root], 7, stated)
    assert store.ids() == []


def test_the_configuration_is_a_part_of_the_digest(store: AdapterStore, tmp_path: Path) -> None:
    one = store.copy(save_tiny_adapter(tmp_path / "a", 1), [tmp_path], 1)
    two = store.copy(save_tiny_adapter(tmp_path / "a", 1, lora_alpha=32), [tmp_path], 2)
    assert one.digest != two.digest


def test_copy_that_cannot_be_synced_raises_cannot_write(store: AdapterStore, tmp_path: Path) -> None:
    files = store.copy(save_tiny_adapter(tmp_path / "a", 1), [tmp_path], 7)
    (Path(files.path) / "adapter_config.json").unlink()
    with pytest.raises(CannotWrite):
        store.complete(7)
    assert store.ids() == [7], "its owner removes it once no replica reads it"


@pytest.mark.slow
def test_copies_leave_no_memory_behind(store: AdapterStore, tmp_path: Path) -> None:
    """malloc keeps what a thread has freed, for each of the threads that have ever copied."""
    source = save_tiny_adapter(tmp_path / "a", 1)
    save_file({"a": torch.zeros(40 << 20, dtype=torch.uint8)}, source / "adapter_model.safetensors")
    before, barrier = resident_mib(), threading.Barrier(6)

    def copy(adapter_id: int) -> None:
        barrier.wait(30)  # each in a thread of its own
        store.copy(source, [tmp_path], adapter_id)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(copy, range(6)))
        assert resident_mib() - before < 30


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.mark.parametrize(
    ("file", "kept"),
    [(CONFIG, None), (TENSORS, None), (TENSORS, 0), (TENSORS, 5), (TENSORS, 100), (TENSORS, -1)],
)
def test_absent_or_truncated_file_is_incomplete(
    store: AdapterStore, tmp_path: Path, file: str, kept: int | None
) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    if kept is None:
        (source / file).unlink()
    else:
        (source / file).write_bytes((source / file).read_bytes()[:kept])
    with pytest.raises(Incomplete, match="does not exist" if kept is None else "header|bytes"):
        store.copy(source, [tmp_path], 1)
    assert store.ids() == [] and list(store.directory.parent.glob("*/.*")) == []


def test_source_outside_the_roots_is_refused(store: AdapterStore, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    (tmp_path / "root").mkdir()
    for path in (source, tmp_path / "root" / ".." / "a"):
        with pytest.raises(ValueError, match="checkpoint_roots"):
            store.copy(path, [tmp_path / "root"], 1)
    (tmp_path / "root" / "link").symlink_to(source)
    with pytest.raises(ValueError, match="checkpoint_roots"):
        store.copy(tmp_path / "root" / "link", [tmp_path / "root"], 1)
    with pytest.raises(ValueError, match="none is configured"):
        store.copy(source, [], 1)


def test_pickled_tensors_are_refused(store: AdapterStore, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickled"):
        store.copy(source, [tmp_path], 1)


@pytest.mark.parametrize(
    ("config", "phrase"), [([], "rank 'r'"), ({"r": "x"}, "rank 'r'"), ({"r": 4, "peft_type": "IA3"}, "LORA")]
)
def test_invalid_configuration_is_refused(
    store: AdapterStore, tmp_path: Path, config: object, phrase: str
) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    (source / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=phrase) as raised:
        store.copy(source, [tmp_path], 1)
    assert not isinstance(raised.value, Incomplete)


def test_file_that_changes_during_the_copy_is_incomplete(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    import deployments.weights.store.adapter_store as module

    stamps = iter(range(100))
    monkeypatch.setattr(module, "_stamp", lambda file: (next(stamps), 1))
    with pytest.raises(Incomplete, match="changed"):
        store.copy(source, [tmp_path], 1)
    assert store.ids() == []
