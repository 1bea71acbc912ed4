"""Checkpoints at a URL: by fsspec's store in memory, and by files that a server gives over HTTP."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.weights.store import uploads
from deployments.weights.store.checkpoint_files import Checkpoint
from deployments.weights.store.uploads import DELTA, UPLOAD, Upload, allowed, download, upload
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store

Tensors = Mapping[str, torch.Tensor]
SHAPES = {"embed.weight": (301, 128), "norm.weight": (127,), "layer.weight": (384, 128)}


@pytest.fixture
def parent() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def save(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir()
    save_file(dict(tensors), directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def random(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}


def stepped(tensors: Tensors) -> Tensors:
    """A bit of every fiftieth word is another one."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.view(torch.int16).view(-1)[::50] ^= 1
    return changed


def downloaded(url: str, store: Store, tmp_path: Path) -> Tensors:
    target = tmp_path / f"downloaded-{len(list(tmp_path.iterdir()))}"
    target.mkdir()
    download(url, target, store)
    assert (target / "config.json").is_file()
    return load_file(target / "model.safetensors")


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stored", [False, True], ids=["no base in the store", "a base in the store"])
def test_a_chain_of_deltas_is_the_checkpoint_that_was_saved(
    parent: str, store: Store, tmp_path: Path, stored: bool
) -> None:
    tensors = random(1)
    directory = save(tmp_path / "checkpoint-0", tensors)
    url = upload(directory, parent)
    files = fsspec.filesystem("memory")
    for number in (1, 2, 3):
        before, tensors = directory, stepped(tensors)
        if number == 3:
            tensors = {**tensors, "norm.weight": tensors["norm.weight"] * 2.5}  # most of one has changed
        directory = save(tmp_path / f"checkpoint-{number}", tensors)
        url = upload(directory, f"{parent}/", base=before)
        assert files.size(f"{url}/{DELTA}") < sum(each.nbytes for each in tensors.values()) / 10
    if stored:
        base = load_file(tmp_path / "checkpoint-1" / "model.safetensors")

        def write_files(path: Path) -> None:
            (path / "config.json").write_text("{}")

        write_version(CommittedVersion(version=7, label=None, tensors=base), store, write_files)
        files.rm(f"{parent}/checkpoint-0", recursive=True)
        files.rm(f"{parent}/checkpoint-1", recursive=True)
    assert same(downloaded(url, store, tmp_path), tensors)


@pytest.mark.parametrize("drafter", ["drafter.fc.weight", "mtp.fc.weight"])
def test_a_stored_version_with_a_drafter_that_the_base_lacks_is_not_the_base(
    parent: str, store: Store, tmp_path: Path, drafter: str
) -> None:
    """Publishers that send no drafter leave it as it is, and the store keeps it with their version."""
    base = save(tmp_path / "a", random(1))
    upload(base, parent)
    url = upload(save(tmp_path / "b", stepped(random(1))), parent, base)
    version = CommittedVersion(
        version=7,
        label=None,
        tensors=random(1),
        drafter=(6, {drafter: torch.ones(3)}),
        mtp={drafter} if drafter.startswith("mtp") else frozenset(),
    )
    write_version(version, store, lambda path: None)
    assert same(downloaded(url, store, tmp_path), stepped(random(1)))


def test_a_stored_version_that_is_damaged_is_not_the_base(parent: str, store: Store, tmp_path: Path) -> None:
    base = save(tmp_path / "a", random(1))
    upload(base, parent)
    url = upload(save(tmp_path / "b", stepped(random(1))), parent, base)
    version = CommittedVersion(version=7, label=None, tensors=random(1))
    weights = write_version(version, store, lambda path: None) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert same(downloaded(url, store, tmp_path), stepped(random(1)))


def test_what_is_uploaded_to_a_disk_is_a_checkpoint_there(tmp_path: Path) -> None:
    """An empty directory for a drafter would be one without weights."""
    upload(save(tmp_path / "a", random(1)), f"file://{tmp_path}/shared")
    Checkpoint.open(str(tmp_path / "shared" / "a"), [tmp_path]).close()


def test_what_has_changed_in_most_is_uploaded_whole(parent: str, store: Store, tmp_path: Path) -> None:
    base = save(tmp_path / "a", random(1))
    upload(base, parent)
    for name, tensors in (("b", random(2)), ("c", {**random(1), "head.weight": torch.ones(3)})):
        url = upload(save(tmp_path / name, tensors), parent, base)
        assert not fsspec.filesystem("memory").exists(f"{url}/{DELTA}")
        assert same(downloaded(url, store, tmp_path), tensors)


def test_a_delta_needs_the_base_that_is_there(parent: str, tmp_path: Path) -> None:
    base = save(tmp_path / "a", random(1))
    new = save(tmp_path / "b", stepped(random(1)))
    with pytest.raises(ValueError, match=r"^memory://bucket/run/b: expected the base .* got none: upload it"):
        upload(new, parent, base)
    (tmp_path / "other").mkdir()
    upload(save(tmp_path / "other" / "a", random(2)), parent)
    with pytest.raises(ValueError, match="got one with digest"):
        upload(new, parent, base)


def test_an_upload_is_repeated_but_not_replaced(parent: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "a", random(1))
    assert upload(directory, parent) == upload(directory, parent) == f"{parent}/a"
    save_file(dict(random(2)), directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"^memory://bucket/run/a: it has a checkpoint with digest"):
        upload(directory, parent)


def test_the_name_of_a_directory_is_a_part_of_a_url(
    parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "a", random(1))
    monkeypatch.chdir(directory)
    assert upload(Path("."), parent) == upload(Path("../a"), parent) == f"{parent}/a"
    with pytest.raises(
        ValueError, match=r"^expected a directory whose name may be in a URL, got 'step=4\?'$"
    ):
        upload(directory.rename(tmp_path / "step=4?"), parent)


def flip(path: str) -> None:
    files = fsspec.filesystem("memory")
    content = bytearray(files.cat_file(path))
    content[len(content) // 2] ^= 1
    files.pipe_file(path, bytes(content))


def replace_base(path: str) -> None:
    files = fsspec.filesystem("memory")
    found = files.cat_file(f"{path}/{UPLOAD}").replace(b'"digest": "', b'"digest": "f')
    files.pipe_file(f"{path}/{UPLOAD}", found)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda parent: flip(f"{parent}/a/model.safetensors"), "it was uploaded with digest .* and arrived"),
        (lambda parent: flip(f"{parent}/b/{DELTA}"), "it was uploaded with digest|expected a delta of"),
        (lambda parent: replace_base(f"{parent}/a"), "expected its base with digest .* at .*/run/a, got"),
        (lambda parent: fsspec.filesystem("memory").rm(f"{parent}/b/{DELTA}"), f"/run/b/{DELTA}"),
        (
            lambda parent: fsspec.filesystem("memory").pipe_file(f"{parent}/b/{UPLOAD}", b"{}"),
            f"b/{UPLOAD} is not of 'slipstream upload': Field required",
        ),
        (
            lambda parent: fsspec.filesystem("memory").pipe_file(
                f"{parent}/b/{UPLOAD}", b'{"digest": "", "files": ["../x"]}'
            ),
            r"must name files beside it, and names '\.\./x'",
        ),
    ],
)
def test_what_is_damaged_is_refused_with_its_url(
    parent: str, store: Store, tmp_path: Path, damage: Callable[[str], None], problem: str
) -> None:
    base = save(tmp_path / "a", random(1))
    upload(base, parent)
    url = upload(save(tmp_path / "b", stepped(random(1))), parent, base)
    damage(parent)
    with pytest.raises(ValueError, match=f"^memory://bucket/run/b: .*{problem}"):
        downloaded(url, store, tmp_path)


def test_bases_that_are_each_others_end(
    parent: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    for name, base in (("a", "b"), ("b", "a")):
        text = f'{{"digest": "1", "base": "{base}", "base_digest": "1"}}'
        files.pipe_file(f"{parent}/{name}/{UPLOAD}", text.encode())
    with pytest.raises(ValueError, match="expected at most 100 deltas"):
        downloaded(f"{parent}/a", store, tmp_path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the URL at which it is."""
    (tmp_path / "served").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_uploads_are_read_over_http(served: tuple[Path, str], store: Store, tmp_path: Path) -> None:
    directory, url = served
    base = save(tmp_path / "a", random(1))
    upload(base, f"file://{directory}/run")
    upload(save(tmp_path / "b", stepped(random(1))), f"file://{directory}/run", base)
    assert same(downloaded(f"{url}/run/b", store, tmp_path), stepped(random(1)))


def test_a_checkpoint_of_another_program_is_read_by_its_index(
    served: tuple[Path, str], store: Store, tmp_path: Path
) -> None:
    directory, url = served
    save(directory / "plain", random(1))
    assert same(downloaded(f"{url}/plain", store, tmp_path), random(1))
    tensors = random(2)
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    (directory / "shards").mkdir()
    for name, file in files.items():
        save_file({name: tensors[name]}, directory / "shards" / file)
    weight_map = str(files).replace("'", '"')
    (directory / "shards" / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    target = tmp_path / "target"
    target.mkdir()
    download(f"{url}/shards", target, store)
    assert same({k: v for f in target.glob("*.safetensors") for k, v in load_file(f).items()}, tensors)
    (directory / "shards" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^http://.*/shards: .*/shards/model-1\.safetensors"):
        download(f"{url}/shards", target, store)


def test_a_checkpoint_that_is_changed_while_it_is_read_is_refused(
    parent: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of each would be a checkpoint that nobody has trained."""
    files = fsspec.filesystem("memory")
    files.put(str(save(tmp_path / "a", random(1))), f"{parent}/a", recursive=True)
    fetch = uploads._fetch

    def changing(*arguments: object) -> None:
        fetch(*arguments)  # type: ignore[arg-type]
        files.pipe_file(f"{parent}/a/model.safetensors", b"longer")

    monkeypatch.setattr(uploads, "_fetch", changing)
    with pytest.raises(ValueError, match="a file was changed while it was read: publish it again"):
        downloaded(f"{parent}/a", store, tmp_path)


def test_an_upload_whose_digest_is_removed_meanwhile_is_compared_with_it(
    parent: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, fetch = fsspec.filesystem("memory"), uploads._fetch
    url = upload(save(tmp_path / "a", random(1)), parent)
    flip(f"{url}/model.safetensors")

    def removing(*arguments: object) -> None:
        fetch(*arguments)  # type: ignore[arg-type]
        if files.exists(f"{url}/{UPLOAD}"):
            files.rm(f"{url}/{UPLOAD}")

    monkeypatch.setattr(uploads, "_fetch", removing)
    with pytest.raises(ValueError, match=r"it was uploaded with digest .* and arrived"):
        downloaded(url, store, tmp_path)


def test_what_cannot_be_reached_is_a_sentence_with_its_url(store: Store, tmp_path: Path) -> None:
    for url, problem in (
        ("http://127.0.0.1:9/run/a", "ClientConnectorError: Cannot connect to host 127.0.0.1:9"),
        ("memory://bucket/none/a", "FileNotFoundError: .*model.safetensors"),
        ("nowhere://bucket/a", "Protocol not known: nowhere"),
    ):
        with pytest.raises(ValueError, match=f"^{url}: .*{problem}"):
            downloaded(url, store, tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",  # deltas name others beside them
        "s3://bucket/run-2/a",
        "s3://bucket/run/../a",
        "s3://bucket/run/%2e%2e/a",
        "s3://bucket/run/a::file:///etc",
        "s3://bucket/run//a",
        "s3://bucket/run/a?x=1",
        "file:///etc/a",
    ],
)
def test_only_what_is_below_a_root_is_read(url: str) -> None:
    roots = ("https://host/", "s3://bucket/run")
    with pytest.raises(ValueError, match=r"^path: expected a URL below one of .* got "):
        allowed(url, roots)
    assert allowed("s3://bucket/run/a/b/", roots) == "s3://bucket/run/a/b"
    assert allowed("https://host/a", roots) == "https://host/a"


def test_names_in_an_upload_are_of_files_beside_it() -> None:
    for name in ("", ".", "..", "/etc/passwd", "a/b", "drafter/../x", "a?b", "%2e%2e"):
        with pytest.raises(ValueError, match="must name files beside it"):
            Upload.read(f'{{"digest": "1", "files": ["{name}"]}}'.encode(), "u")
    assert Upload.read(b'{"digest": "1", "files": ["drafter/model.safetensors"]}', "u").files
