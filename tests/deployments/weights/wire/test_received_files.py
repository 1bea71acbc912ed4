import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.host.shared_memory import DIRECTORY
from deployments.weights.wire.received_files import PART_BYTES, ReceivedFiles
from tests.full_disk import full_disk


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of shared memory."""
    place = DIRECTORY / f"test-received-{uuid.uuid4().hex}"
    yield place
    assert not list(DIRECTORY.glob(f"{place.name}*"))


@pytest.mark.parametrize("size", [0, 1, 4096, 1_000_001])
def test_a_file_has_the_bytes_of_its_tensor(tmp_path: Path, size: int) -> None:
    content = torch.randint(0, 256, (2 * size,), dtype=torch.uint8)[::2]  # not contiguous
    files = ReceivedFiles(tmp_path / "files")
    files.add([("a", content)])
    assert not (tmp_path / "files").exists(), "not before all of them were compared"
    files.complete()
    assert (tmp_path / "files" / "a").read_bytes() == bytes(content.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES, 5 * PART_BYTES + 3])
def test_a_file_is_written_from_a_gpu(tmp_path: Path, size: int) -> None:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    files = ReceivedFiles(tmp_path / "files")
    files.add([("a", content)])
    files.complete()
    assert (tmp_path / "files" / "a").read_bytes() == content.cpu().numpy().tobytes()


def test_full_memory_is_reported_and_leaves_no_file(directory: Path) -> None:
    files = ReceivedFiles(directory)
    files.add([("small", torch.ones(5, dtype=torch.uint8))])
    refused = pytest.raises(ValueError, match="'large' cannot be written to shared memory")
    with full_disk(1 << 20), refused:  # a write is short, and the next one fails
        files.add([("large", torch.zeros(3 << 20, dtype=torch.uint8))])
    files.close()
