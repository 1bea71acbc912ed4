import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.weights.store.checkpoint_files import INDEX, Checkpoint, check_files, confined, stated
from deployments.weights.store.owner import claim
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import MANIFEST, Store
from deployments.weights.wire.digest import digest
from deployments.weights.wire.digest_definition import version_digest

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
    "odd": torch.arange(5, dtype=torch.uint8),
}
SHARDS = ({"w": TENSORS["w"]}, {name: TENSORS[name] for name in ("b", "scale", "odd")})


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00002.safetensors"


def sharded(directory: Path, *, index: bool = True) -> Path:
    directory.mkdir()
    for number, tensors in enumerate(SHARDS, start=1):
        save_file(tensors, directory / shard(number))
    weight_map = {name: shard(number) for number, each in enumerate(SHARDS, start=1) for name in each}
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def whole(directory: Path) -> Path:
    directory.mkdir()
    save_file(TENSORS, directory / "model.safetensors")
    return directory


def opened(directory: Path, part_bytes: int = 1 << 20) -> Checkpoint:
    checkpoint = Checkpoint.open(str(directory), [directory.parent], part_bytes)
    checkpoint.close()
    return checkpoint


@pytest.mark.parametrize("write", [whole, sharded, lambda path: sharded(path, index=False)])
@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_parts_have_the_digests_of_their_tensors(
    tmp_path: Path, write: Callable[[Path], Path], part_bytes: int
) -> None:
    checkpoint = opened(write(tmp_path / "model"), part_bytes)
    parts = [stated(part) for part in checkpoint.parts]
    found = {name: each for part in parts for name, each in zip(part.names, part.digests, strict=True)}
    assert found == {name: f"{digest(tensor):016x}" for name, tensor in TENSORS.items()}
    assert checkpoint.size_bytes == sum(tensor.numel() * tensor.itemsize for tensor in TENSORS.values())
    assert all(len(part.names) == 1 for part in parts) is (part_bytes == 1)


def test_only_indexed_files_are_read(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "model")
    save_file({"w": torch.zeros(9)}, directory / "consolidated.safetensors")
    assert {name for part in opened(directory).parts for name in part.names} == set(TENSORS)


def test_first_part_carries_the_configuration(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "model")
    (directory / "config.json").write_text('{"model_type": "toy"}')
    assert [part.config for part in opened(directory).parts] == [{"model_type": "toy"}, None]


# -- what is refused -------------------------------------------------------------------------------


def _cut_off(directory: Path) -> None:
    with (directory / shard(2)).open("r+b") as file:
        file.truncate((directory / shard(2)).stat().st_size - 1)


def _only_bin(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        file.unlink()
    (directory / INDEX).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"x")


def _unnamed_tensor(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["more"] = shard(1)
    (directory / INDEX).write_text(json.dumps(index))


def _backwards(directory: Path) -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}).encode()
    (directory / shard(1)).write_bytes(struct.pack("<Q", len(text)) + text)


def _adapter(directory: Path) -> None:
    _only_bin(directory)
    save_file({"w": TENSORS["w"]}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("{}")


def _old_whole(directory: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, directory / "model.safetensors")


def _old_shards(directory: Path) -> None:
    _old_whole(directory)
    (directory / INDEX).unlink()


def _fifo(directory: Path) -> None:
    (directory / shard(1)).unlink()
    os.mkfifo(directory / shard(1))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda d: (d / shard(2)).unlink(), "lacks 1 files, first .*00002-of-00002"),
    "no index, a shard is missing": (
        lambda d: ((d / shard(2)).unlink(), (d / INDEX).unlink()),
        "lacks 1 files, first .*00002-of-00002.*00001-of-00002.safetensors says so",
    ),
    "a shard is cut off": (_cut_off, "must have [0-9]+ bytes by its header, and has"),
    "a tensor of the index is nowhere": (
        _unnamed_tensor,
        "1 tensors of .* are in none of its files: .'more'.",
    ),
    "no safetensors": (_only_bin, r"must have \*.safetensors files, and has only \['pytorch_model.bin'\]"),
    "an adapter": (_adapter, "is an adapter"),
    "an index elsewhere": (
        lambda d: (d / INDEX).write_text('{"weight_map": {"w": "../x.safetensors"}}'),
        "must name files beside it, and names '../x.safetensors'",
    ),
    "an index that is none": (lambda d: (d / INDEX).write_text("[]"), "is not an index that can be read"),
    "a header of any size": (
        lambda d: (d / shard(1)).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        "no safetensors header that can be read: a header of",
    ),
    "a header of something else": (
        lambda d: (d / shard(1)).write_bytes(struct.pack("<Q", 8) + b'{"a":[]}'),
        "no safetensors header",
    ),
    "a tensor that ends before it begins": (_backwards, "ends before it begins: 'w'"),
    "no tensors": (
        lambda d: (
            [(d / shard(n)).write_bytes(struct.pack("<Q", 2) + b"{}") for n in (1, 2)]
            and (d / INDEX).unlink()
        ),
        "has no tensors",
    ),
    "a tensor twice": (
        lambda d: save_file({**SHARDS[1], "w": TENSORS["w"]}, d / shard(2)),
        "'w' is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors",
    ),
    "an index and a file of all": (
        _old_whole,
        "has model.safetensors, which transformers loads alone, and model.safetensors.index.json: vLLM loads",
    ),
    "shards and a file of all": (_old_shards, "and no index: vLLM loads .*00001-of-00002.*remove the files"),
    "a name in Latin-1": (
        lambda d: (
            ((d / shard(1)).rename(d / os.fsdecode(b"caf\xe9.safetensors")) and (d / shard(2)).unlink())
            or (d / INDEX).unlink()
        ),
        "expected a path in UTF-8",
    ),
    "nested without end": (
        lambda d: (d / "config.json").write_text('{"a":' + "[" * 100_000),
        "config.json is not JSON: maximum recursion",
    ),
    "a configuration that is none": (lambda d: (d / "config.json").write_text("[1]"), "must be an object"),
    "what would wait for a writer": (_fifo, "lacks 1 files"),
}


@pytest.mark.parametrize("case", WRONG)
def test_incomplete_checkpoint_is_refused_by_its_headers(tmp_path: Path, case: str) -> None:
    directory = sharded(tmp_path / "model")
    spoil, message = WRONG[case]
    spoil(directory)
    with pytest.raises(ValueError, match=message):
        opened(directory)


def test_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (
        ("file", "must be a checkpoint directory, and is a file"),
        ("no", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint.open(str(tmp_path / name), [tmp_path])


# -- where it may be -------------------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name in ("one", "two", "out"):
        whole(tmp_path / name)
    (tmp_path / "one" / "inside").symlink_to(tmp_path / "two")
    (tmp_path / "one" / "outside").symlink_to(tmp_path / "out")
    (tmp_path / "one" / "loop").symlink_to(tmp_path / "one" / "loop")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    return [tmp_path / "link", tmp_path / "two"]


@pytest.mark.parametrize("path", ["one", "link", "one/inside", "two/../two", "link/missing"])
def test_path_below_a_root_is_accepted_through_links(tmp_path: Path, roots: list[Path], path: str) -> None:
    assert confined(f"{tmp_path}/{path}", roots) == Path(os.path.realpath(f"{tmp_path}/{path}"))


@pytest.mark.parametrize(
    "path", ["out", "one/../out", "one/outside", "two/../one/outside", "onetwo", "", "one/loop/x", "one/\0"]
)
def test_path_outside_the_roots_is_refused_whether_it_exists_or_not(
    tmp_path: Path, roots: list[Path], path: str
) -> None:
    with pytest.raises(ValueError, match="path: "):
        confined(f"{tmp_path}/{path}", roots)


@pytest.mark.parametrize("path", ["one", "/", "~/x", "/etc", "x" * 5000])
def test_relative_path_and_whole_disk_are_refused(roots: list[Path], path: str) -> None:
    with pytest.raises(ValueError, match="below one of"):
        confined(path, roots)
    with pytest.raises(ValueError, match=r"below one of \[\] \(the store, and 'security.checkpoint_roots'\)"):
        confined(path, [])


def test_link_to_a_file_outside_the_roots_is_refused(tmp_path: Path) -> None:
    """The hub's cache has links to its blobs."""
    out, root = whole(tmp_path / "out"), tmp_path / "root"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshot").mkdir()
    (out / "model.safetensors").rename(root / "blobs" / "aa")
    (root / "snapshot" / "model.safetensors").symlink_to(root / "blobs" / "aa")
    checkpoint = Checkpoint.open(str(root / "snapshot"), [root])
    assert [part.path for part in checkpoint.parts] == [str(root / "blobs" / "aa")]
    checkpoint.close()
    (root / "blobs" / "aa").rename(out / "aa")
    (root / "snapshot" / "model.safetensors").unlink()
    (root / "snapshot" / "model.safetensors").symlink_to(out / "aa")
    with pytest.raises(ValueError, match="is a link to a file outside of"):
        Checkpoint.open(str(root / "snapshot"), [root])


# -- while it is read ------------------------------------------------------------------------------


def test_file_that_changes_during_the_read_is_named(tmp_path: Path) -> None:
    checkpoint = opened(whole(tmp_path / "model"))
    assert checkpoint.changed() is None
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    assert checkpoint.changed() == f"{file} was changed while it was read"


def test_file_that_shrinks_raises_and_does_not_crash_the_process(tmp_path: Path) -> None:
    checkpoint = opened(whole(tmp_path / "model"))
    os.truncate(tmp_path / "model" / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: the file ends before byte"):
        stated(checkpoint.parts[0])


def test_stored_version_is_not_removed_while_it_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    path = write_version(CommittedVersion(version=3, label=None, tensors=TENSORS), store, lambda _: None)
    checkpoint = Checkpoint.open(str(path), [store.directory])
    assert store.remove(3) is False
    checkpoint.close()
    descriptor = os.open(path / "model.safetensors", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="is being removed from the store"):
        Checkpoint.open(str(path), [store.directory])
    os.close(descriptor)
    assert store.remove(3) is True


@pytest.mark.slow
def test_router_reads_without_torch() -> None:
    """It would take seconds of the interpreter lock, beside requests."""
    code = "import sys, app.http.directory_publisher\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# -- stored versions -------------------------------------------------------------------------------


def write(store: Store, tensors: dict[str, torch.Tensor], fleet_id: str | None = None) -> Path:
    if fleet_id is not None:
        claim(store.directory, fleet_id, Path("/state"))
    committed = CommittedVersion(version=3, label=None, fleet_id=fleet_id, tensors=tensors)
    return write_version(committed, store, lambda directory: None)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """The directory of version 3."""
    return write(Store(tmp_path / "store"), TENSORS | {"empty": torch.zeros(0, 4)})


def rotten(directory: Path, name: str) -> None:
    """Flip a bit of this tensor."""
    (part,) = [part for part in opened(directory, 1).parts if name in part.names]
    with Path(part.path).open("r+b") as file:
        file.seek(part.ranges[part.names.index(name)][0])
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_stored_version_matches_its_manifest(version: Path) -> None:
    check_files(version, 3)
    checkpoint = opened(version)
    assert checkpoint.written is not None and checkpoint.written.version == 3
    for part in checkpoint.parts:
        assert stated(part, checkpoint.written) == stated(part)


def test_all_files_of_a_stored_version_are_compared(version: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(version / "model.safetensors").items()}
    save_file({"w": tensors.pop("w")}, version / "model-2.safetensors")
    save_file(tensors, version / "model.safetensors")
    check_files(version, 3)


@pytest.mark.parametrize("name", TENSORS)
def test_flipped_bit_is_reported_with_the_name_of_its_tensor(version: Path, name: str) -> None:
    rotten(version, name)
    damage = (
        f"^version 3 in {version} is damaged: '{name}' was written with digest \\w{{16}} and has \\w{{16}}"
    )
    checkpoint = opened(version)
    with pytest.raises(ValueError, match=damage + "; publish another version"):
        [stated(part, checkpoint.written) for part in checkpoint.parts]
    with pytest.raises(ValueError, match=damage + "$"):
        check_files(version, 3)


def test_added_and_missing_tensors_are_reported(version: Path) -> None:
    tensors = {name: TENSORS[name] for name in TENSORS if name != "odd"}
    save_file({**tensors, "more": torch.ones(2)}, version / "model.safetensors")
    message = "is damaged: 'empty' was written and is gone; 'more' is not in its manifest; 'odd' was written"
    with pytest.raises(ValueError, match=message):
        opened(version)
    with pytest.raises(ValueError, match=message):
        check_files(version, 3)


def test_directory_with_another_version_is_refused(version: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(version, tmp_path / "store" / "v00000004")
    with pytest.raises(ValueError, match=r"v00000004 must hold version 4, and its manifest says 3"):
        check_files(copy, 4)
    with pytest.raises(FileNotFoundError, match="version 3 must be in"):
        check_files(tmp_path, 3)


def test_version_of_another_fleet_or_commit_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    path = write(store, {"w": torch.ones(2)}, "a")
    written = store.manifest_of(3).digest
    assert written == version_digest(["w"], [digest(torch.ones(2))])
    check_files(path, 3, "a", written)
    with pytest.raises(ValueError, match="must hold version 3 of fleet b, and its manifest names fleet a"):
        check_files(path, 3, "b")
    with pytest.raises(ValueError, match=f"as it was committed, with digest 00ff, and .* states {written}"):
        check_files(path, 3, "a", "00ff")


def test_manifest_of_another_program_is_ignored(tmp_path: Path) -> None:
    directory = whole(tmp_path / "model")
    assert opened(directory).written is None
    (directory / MANIFEST).write_text('{"version": "1.2", "files": []}')
    assert opened(directory).written is None
    (directory / MANIFEST).unlink()
    os.mkfifo(directory / MANIFEST)  # opening it would block
    assert opened(directory).written is None
