"""Checkpoints at a URL that fsspec knows (S3, GCS, HTTP), of a trainer that shares no disk with the fleet.

    upload     checkpoint-10/  *.safetensors, config.json, upload.json
               checkpoint-11/  delta.safetensors, upload.json: what differs from checkpoint-10
    download   a directory on the fleet's shared disk, which the router publishes as any other

`upload.json` is written last, and has the digest of all tensors. Without one a checkpoint, as other programs
upload it, is taken whole. A base is a stored version with its digest, or is downloaded too. Imports no torch.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import numpy as np
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import save_file

from deployments.weights.store.checkpoint_files import (
    INDEX,
    PART_BYTES,
    WHOLE,
    check_files,
    files_of,
    open_file,
    parts_of,
    read_header,
    read_into,
)
from deployments.weights.store.versions import DRAFTER, DRAFTER_DIRECTORY, Store
from deployments.weights.wire.delta import apply_delta, encode_delta
from deployments.weights.wire.digest_definition import Bytes, digest_bytes, version_digest

UPLOAD = "upload.json"
DELTA = "delta.safetensors"
CONFIG = "config.json"
CHANGED, REPLACED = "changed:", "replaced:"  # begin the names in DELTA, before a tensor's
MAX_DELTAS = 100
PIECE_BYTES = 16 << 20
_WORD_BYTES = 8  # a delta's block is a multiple of it
_CHECKED = ("ETag", "etag", "Last-Modified", "LastModified", "updated", "mtime", "created", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    digest: str  # `version_digest` of all tensors
    files: Sequence[str] = ()  # beside it; empty with a base
    base: str | None = None  # sibling directory that `delta.safetensors` changes
    base_digest: str | None = None

    @classmethod
    def read(cls, text: bytes, url: str) -> Self:
        try:
            found: Self = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{url}/{UPLOAD} is not of 'slipstream upload': {first['msg']}") from error
        names = [*found.files, *([] if found.base is None else [found.base])]
        if strange := [name for name in names if not _is_plain(name)]:
            raise ValueError(f"{url}/{UPLOAD} must name files beside it, and names {strange[0]!r:.200}")
        return found


def _is_plain(name: str) -> bool:
    own = name.removeprefix(f"{DRAFTER_DIRECTORY}/")
    return own == Path(own).name and own not in ("", ".", "..") and _is_literal(own)


def _is_literal(text: str) -> bool:
    return unquote(text) == text and not any(each in text for each in ("::", "?", "#", "\\", "*"))


def allowed(url: str, roots: Sequence[str]) -> str:
    """The URL without a trailing slash. Raises ValueError unless it is below one of the roots."""
    plain = url.rstrip("/")
    for root in roots:
        below = plain.removeprefix(f"{root.rstrip('/')}/")
        if below != plain and all(_is_plain(part) for part in below.split("/")):
            return plain
    raise ValueError(
        f"path: expected a URL below one of {list(roots)} ('security.checkpoint_roots'), got {url!r:.200}"
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    path: str
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    def read(self) -> Bytes:
        """Padded with zeros to a whole word."""
        block = np.zeros(-(-self.size_bytes // _WORD_BYTES) * _WORD_BYTES, dtype=np.uint8)
        with open_file(Path(self.path)) as file:
            read_into(file, self.begin, block[: self.size_bytes].data)
        return block

    def digest(self, block: Bytes) -> int:
        return digest_bytes(block[: self.size_bytes])


def upload(directory: Path, parent: str, base: Path | None = None) -> str:
    """Copy a checkpoint directory to `parent`/NAME, and return that URL.

    Args:
        base: a checkpoint that was uploaded there before; what differs from it is uploaded, unless that is
            more than half.

    Raises:
        ValueError: it is no checkpoint, the base there is another one, the URL has another checkpoint, or
            cannot be written.
    """
    directory = Path(os.path.abspath(directory))  # its name counts, also if it is `.`
    base = None if base is None else Path(os.path.abspath(base))
    for name in (directory.name, *([] if base is None else [base.name])):
        if not _is_plain(name):
            raise ValueError(f"expected a directory whose name may be in a URL, got {name!r:.200}")
    url = f"{parent.rstrip('/')}/{directory.name}"
    files, tensors = _checkpoint(directory)
    with _of(url), tempfile.TemporaryDirectory() as aside:
        store, root = _opened(url)
        delta: dict[str, Bytes] = {}
        if base is None:
            found = _whole(directory, files, _digest(tensors))
        else:
            delta, found = _difference(directory, files, tensors, base)
            _require_base(f"{parent.rstrip('/')}/{base.name}", found)
        if isinstance(store, LocalFileSystem):
            for name in (UPLOAD, *found.files):
                os.makedirs(os.path.dirname(f"{root}/{name}"), exist_ok=True)
        before = _read(store, f"{root}/{UPLOAD}")
        if before is not None and (there := Upload.read(before, url).digest) != found.digest:
            raise ValueError(f"it has a checkpoint with digest {there}, and {directory} has {found.digest}")
        if before is not None:
            return url
        if found.base is not None:
            save_file(delta, Path(aside, DELTA))
            store.put_file(str(Path(aside, DELTA)), f"{root}/{DELTA}")
        for name in found.files:
            store.put_file(str(directory / name), f"{root}/{name}")
        store.pipe_file(f"{root}/{UPLOAD}", json.dumps(asdict(found), indent=1).encode())
    return url


def _checkpoint(directory: Path) -> tuple[list[Path], dict[str, _Tensor]]:
    """The files to load, and the tensors of a version by their names in it."""
    files = files_of(directory)
    parts = list(parts_of(directory, files, PART_BYTES))
    drafter = directory / DRAFTER_DIRECTORY
    if drafter.is_dir():
        of_drafter = files_of(drafter)
        parts += parts_of(drafter, of_drafter, PART_BYTES, DRAFTER)
        files = [*files, *of_drafter]
    tensors = {
        name: _Tensor(dtype, shape, part.path, *place)
        for part in parts
        for name, dtype, shape, place in zip(part.names, part.dtypes, part.shapes, part.ranges, strict=True)
    }
    return files, tensors


def _digest(tensors: Mapping[str, _Tensor]) -> str:
    return version_digest(list(tensors), [each.digest(each.read()) for each in tensors.values()])


def _whole(directory: Path, files: Sequence[Path], digest: str) -> Upload:
    beside = [directory / INDEX, directory / CONFIG, directory / DRAFTER_DIRECTORY / INDEX]
    paths = [*files, *(file for file in beside if file.is_file())]
    return Upload(digest=digest, files=[str(path.relative_to(directory)) for path in paths])


def _difference(
    directory: Path, files: Sequence[Path], tensors: Mapping[str, _Tensor], base: Path
) -> tuple[dict[str, Bytes], Upload]:
    """Nothing, and the upload of all files, if most differ."""
    _, former = _checkpoint(base)
    digests, base_digests, delta, size = {}, {}, {}, 0
    fits = {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in former.items()
    }
    most = sum(each.size_bytes for each in tensors.values()) // 2
    for name, tensor in tensors.items():
        block = tensor.read()
        digests[name] = tensor.digest(block)
        if not fits:
            continue
        old = former[name].read()
        base_digests[name] = tensor.digest(old)
        if digests[name] == base_digests[name] or size > most:
            continue
        encoded = encode_delta(block, old)
        if encoded is None:
            delta[REPLACED + name], size = block[: tensor.size_bytes].copy(), size + tensor.size_bytes
        else:
            delta[CHANGED + name], size = encoded, size + encoded.size
    digest = version_digest(list(digests), list(digests.values()))
    if not fits or size > most:
        return {}, _whole(directory, files, digest)
    base_digest = version_digest(list(base_digests), list(base_digests.values()))
    return delta, Upload(digest=digest, base=base.name, base_digest=base_digest)


def _require_base(url: str, found: Upload) -> None:
    if found.base is None:
        return
    store, root = _opened(url)
    text = _read(store, f"{root}/{UPLOAD}")
    there = None if text is None else Upload.read(text, url).digest
    if there != found.base_digest:
        has = "none" if there is None else f"one with digest {there}"
        raise ValueError(
            f"expected the base with digest {found.base_digest} at {url}, got {has}: upload it first"
        )


def download(url: str, target: Path, store: Store) -> None:
    """Make the directory `target` of the checkpoint at a URL. `store`: versions that may be its base. Raises
    ValueError: absent, damaged, changed meanwhile, or unreadable, or the disk refuses it."""
    with _of(url), ExitStack() as stack:
        uploaded = found = _described(url)
        deltas: list[str] = []
        base = None
        while found is not None and found.base is not None and base is None:
            if len(deltas) == MAX_DELTAS:
                raise ValueError(f"expected at most {MAX_DELTAS} deltas before a whole checkpoint, got more")
            deltas.append(url)
            base = _stored(store, found.base_digest)
            url = f"{url.rpartition('/')[0]}/{found.base}"
            expected, found = found.base_digest, None if base is not None else _described(url)
            if base is None and (found is None or found.digest != expected):
                raise ValueError(f"expected its base with digest {expected} at {url}, got another or none")
        if base is None:
            _fetch_whole(url, target, found)
        else:
            _copy(stack.enter_context(store.reading(base)), target)
        for each in reversed(deltas):
            _apply(each, target)
        if uploaded is not None:
            _, tensors = _checkpoint(target)
            if (digest := _digest(tensors)) != uploaded.digest:
                raise ValueError(f"it was uploaded with digest {uploaded.digest}, and arrived with {digest}")


def _described(url: str) -> Upload | None:
    """None: uploaded by another program."""
    store, root = _opened(url)
    text = _read(store, f"{root}/{UPLOAD}")
    return None if text is None else Upload.read(text, url)


def _stored(store: Store, digest: str | None) -> int | None:
    for version in reversed(store.list()):
        with suppress(OSError, ValueError):  # damaged, or removed by now
            # The manifest's digest is of what was published; the files may also hold a drafter kept from
            # before.
            tensors = store.manifest_of(version).tensors
            if version_digest(list(tensors), [int(each.digest, 16) for each in tensors.values()]) == digest:
                check_files(store.path_of(version), version)
                return version
    return None


def _fetch_whole(url: str, target: Path, found: Upload | None) -> None:
    store, root = _opened(url)
    names = _names(store, root, url) if found is None else found.files
    before = _states(store, root, names) if found is None else None
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        _fetch(store, f"{root}/{name}", target / name)
    if found is None and _states(store, root, names) != before:
        raise ValueError("a file was changed while it was read: publish it again once it is complete")


def _names(store: AbstractFileSystem, root: str, url: str) -> list[str]:
    """Not a listing, which HTTP has not, and others may keep."""
    index = _read(store, f"{root}/{INDEX}")
    names = [WHOLE]
    if index is not None:
        try:
            names = sorted({INDEX, *json.loads(index)["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{url}/{INDEX} is not an index that can be read: {error!r:.200}") from error
        if strange := [name for name in names if not isinstance(name, str) or not _is_plain(name)]:
            raise ValueError(f"{url}/{INDEX} must name files beside it, and names {strange[0]!r:.200}")
    return [*names, *([CONFIG] if _read(store, f"{root}/{CONFIG}") is not None else [])]


def _states(store: AbstractFileSystem, root: str, names: Sequence[str]) -> list[dict[str, str]]:
    store.invalidate_cache()
    found = [store.info(f"{root}/{name}") for name in names]
    return [{key: str(each[key]) for key in _CHECKED if key in each} for each in found]


def _copy(directory: Path, target: Path) -> None:
    for file in [*_checkpoint(directory)[0], directory / CONFIG]:
        if file.is_file():
            place = target / file.relative_to(directory)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


def _apply(url: str, target: Path) -> None:
    store, root = _opened(url)
    with tempfile.TemporaryDirectory(dir=target) as aside:
        file = Path(aside, DELTA)
        _fetch(store, f"{root}/{DELTA}", file)
        _, tensors = _checkpoint(target)
        header = read_header(file)
        for key, entry in header.entries.items():
            kind, _, name = key.partition(":")
            begin, end = (header.start + place for place in entry.data_offsets)
            tensor = tensors.get(name)
            if tensor is None or f"{kind}:" not in (CHANGED, REPLACED):
                raise ValueError(f"{url}/{DELTA} changes {key!r:.200}, which its base has not")
            data = _Tensor(entry.dtype, entry.shape, str(file), begin, end)
            block = tensor.read()
            if f"{kind}:" == CHANGED:
                apply_delta(data.read()[: data.size_bytes], block)
            elif data.size_bytes == tensor.size_bytes:
                block = data.read()
            else:
                raise ValueError(f"{url}/{DELTA} has {data.size_bytes} bytes of {name!r:.200}")
            with open(tensor.path, "r+b") as weights:
                weights.seek(tensor.begin)
                weights.write(block[: tensor.size_bytes].data)


@contextmanager
def _of(url: str) -> Iterator[None]:
    """Translates errors and names the URL."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    except Exception as error:  # each store's library has its own errors
        raise ValueError(f"{url}: {type(error).__name__}: {error}") from error


def _opened(url: str) -> tuple[AbstractFileSystem, str]:
    store, root = url_to_fs(url)
    store.invalidate_cache()
    return store, str(root).rstrip("/")


def _read(store: AbstractFileSystem, path: str) -> bytes | None:
    """None: absent."""
    try:
        content: bytes = store.cat_file(path)
    except FileNotFoundError:
        return None
    return content


def _fetch(store: AbstractFileSystem, path: str, target: Path) -> None:
    with store.open(path, "rb", block_size=PIECE_BYTES) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, PIECE_BYTES)
