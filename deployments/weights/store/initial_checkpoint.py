"""What version 0 is: the digest of a directory's weight files, or a hub id's commit, whose files never
change. A directory may be overwritten: its files are read before the engine reads them, and their identities
compared afterwards."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from deployments.protocol.poll import InitialWeights
from deployments.weights.store.checkpoint_files import (
    OTHER_FORMATS,
    Identity,
    identity_of,
    open_file,
    read_into,
)
from deployments.weights.store.hub import commit_of
from deployments.weights.wire.digest_definition import digest_bytes, version_digest

PIECE_BYTES = 8 << 20  # stays in a core's cache between the read and the digest
THREADS = 4


class InitialCheckpoint:
    """The fleet's configured checkpoint: a directory, or a hub id of a `revision`. `has_files`: False if the
    engine makes its weights up (`load_format: dummy`)."""

    def __init__(self, model: str, revision: str | None = None, *, has_files: bool = True) -> None:
        self._model = model
        self._revision = revision
        self._has_files = has_files
        self._read: Mapping[Path, Identity] = {}  # identities before `_weights` was read
        self._weights: InitialWeights | None = None

    def check(self, known: InitialWeights | None) -> InitialWeights | None:
        """What an engine of this host loads now; None: not known. Reads a directory's weight files, unless
        they are as before. `known`: what version 0 is, or None; a branch that has moved since is not
        followed. Raises OSError, or ValueError: it is not version 0, or a file shrank during the read."""
        found = self._find(known)
        if known is not None and found != known:
            has = "weights that cannot be identified" if found is None else found
            raise ValueError(
                f"version 0 of this fleet is {known}, and {self._model} has {has} here: restore it, or move "
                "'state_dir' away to begin with what is there"
            )
        return found

    def _find(self, known: InitialWeights | None) -> InitialWeights | None:
        if not self._has_files:
            return None
        if not Path(self._model).is_dir():
            same = known is not None and known.revision == self._revision
            commit = commit_of(
                self._model, self._revision, preferred=known.commit if known and same else None
            )
            return None if commit is None else InitialWeights(commit=commit, revision=self._revision)
        files = self._identities()
        if self._weights is None or files != self._read:
            self._weights = InitialWeights(digest=_digest(files)) if files else None
            self._read = files
        return self._weights

    def changed(self) -> str | None:
        now = self._identities() if self._read else {}
        for file in sorted(now.keys() | self._read.keys()):
            if now.get(file) != self._read.get(file):
                return f"{file} was changed while it was loaded"
        return None

    def _identities(self) -> dict[Path, Identity]:
        directory, found = Path(self._model), {}
        files = [*directory.glob("*.safetensors")]
        for file in files or [file for pattern in OTHER_FORMATS for file in directory.glob(pattern)]:
            with suppress(FileNotFoundError):
                found[file] = identity_of(file)
        return found


def _digest(files: Mapping[Path, Identity]) -> str:
    pieces = [
        (file, begin, min(begin + PIECE_BYTES, size))
        for file, (_, _, size, _) in sorted(files.items())
        for begin in range(0, size, PIECE_BYTES)
    ]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as threads:
        digests = list(threads.map(_digest_of_piece, pieces))
    return version_digest([f"{file.name}:{begin}" for file, begin, _ in pieces], digests)


def _digest_of_piece(piece: tuple[Path, int, int]) -> int:
    file, begin, end = piece
    data = np.empty(end - begin, dtype=np.uint8)
    with open_file(file) as stream:
        read_into(stream, begin, data.data)
    return digest_bytes(data)
