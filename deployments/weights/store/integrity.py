"""Whether the files of a stored version hold what was committed, before anybody loads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from deployments.weights.store.manifest import StoredTensor, VersionManifest
from deployments.weights.store.versions import MANIFEST
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest import digest


def check_files(
    directory: Path, version: int, fleet_id: str | None = None, expected_digest: str | None = None
) -> None:
    """Compare every tensor in a version's directory with its manifest. Reads each file once.

    Args:
        fleet_id: whose version it must be; None: anybody's.
        expected_digest: with which the fleet committed it; None: not known.

    Raises:
        ValueError: the directory holds another version, or a tensor is not the one that was written; the
            message names the first few.
        OSError: the version is not there, or a file cannot be read.
    """
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"version {version} must be in {directory}, and there is none")
    manifest = VersionManifest.decode((directory / MANIFEST).read_bytes())
    if manifest.version != version:
        raise ValueError(f"{directory} must hold version {version}, and its manifest says {manifest.version}")
    if fleet_id is not None and manifest.fleet_id != fleet_id:
        raise ValueError(
            f"{directory} must hold version {version} of fleet {fleet_id}, and its manifest names "
            f"{_fleet(manifest.fleet_id)}"
        )
    if expected_digest is not None and manifest.digest != expected_digest:
        raise ValueError(
            f"{directory} must hold version {version} as it was committed, with digest {expected_digest}, "
            f"and its manifest states {manifest.digest}"
        )
    stated = {name: tensor.digest for name, tensor in manifest.tensors.items()}
    found = dict(_digests(directory))
    problems = [f"{name!r} is not in its manifest" for name in found.keys() - stated.keys()]
    problems += [
        f"{name!r} was written with digest {expected} and has {found.get(name, 'no bytes')}"
        for name, expected in stated.items()
        if found.get(name) != expected
    ]
    if problems:
        raise ValueError(f"version {version} in {directory} is damaged: {join_reasons(problems)}")


def check_same(stored: VersionManifest, written: VersionManifest) -> None:
    """Check that a version that is in the store already has the weights that were to be written.

    Raises:
        ValueError: it has others, or its manifest cannot tell; the message names the first few tensors.
    """
    if stored.fleet_id != written.fleet_id:
        raise ValueError(
            f"version {written.version} is in the store already: of {_fleet(stored.fleet_id)}, and this is "
            f"{_fleet(written.fleet_id)}"
        )
    problems = [
        f"{name!r} is {_described(stored.tensors, name)} there and {_described(written.tensors, name)} here"
        for name in sorted(stored.tensors.keys() | written.tensors.keys())
        if stored.tensors.get(name) != written.tensors.get(name)
    ]
    if problems:
        raise ValueError(
            f"version {written.version} is in the store already with other weights (of another fleet?): "
            + join_reasons(problems)
        )


def _fleet(fleet_id: str | None) -> str:
    return "no fleet" if fleet_id is None else f"fleet {fleet_id}"


def _described(tensors: Mapping[str, StoredTensor], name: str) -> str:
    tensor = tensors.get(name)
    if tensor is None:
        return "absent"
    return f"{tensor.dtype} {list(tensor.shape)} with digest {tensor.digest}"


def _digests(directory: Path) -> Iterator[tuple[str, str]]:
    """The digest of each tensor in the directory, by name, with one tensor in memory at a time."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.offset_keys():  # in the order of the file
                    yield name, f"{digest(tensors.get_tensor(name)):016x}"
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
