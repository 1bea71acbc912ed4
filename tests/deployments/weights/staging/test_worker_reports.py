import json
import mmap
import struct
from collections.abc import Iterator

import pytest

from deployments.host.shared_memory import open_mapping, remove_segment
from deployments.protocol.poll import Check, Outcome, StoreResult
from deployments.weights.staging.worker_reports import (
    SLOT_BYTES,
    ConnectState,
    ProgressPage,
    StagingState,
    from_wire,
    to_wire,
)

REPORTS = [
    ConnectState(done=True, outcome=Outcome.TRANSFER_FAILED, message="2 of 3 joined"),
    StagingState(
        payloads_done=2,
        size_bytes=1 << 40,
        stage_s=1.5,
        verify_s=0.5,
        outcome=Outcome.DONE,
        digest="ab",
        checks=(Check.NAMES, Check.FINITE),
    ),
    StoreResult(version=3, label=None, path="/store/v00000003", problem=""),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_is_decoded_as_it_was_encoded(report: object) -> None:
    encoded = to_wire(report)
    assert json.loads(json.dumps(encoded)) == encoded, "vLLM carries JSON types"
    assert from_wire(type(report), encoded) == report


def state(payloads_done: int, message: str = "") -> StagingState:
    return StagingState(
        payloads_done=payloads_done,
        size_bytes=1 << 40,
        stage_s=0.25,
        verify_s=0.125,
        outcome=Outcome.REJECTED if message else Outcome.DONE,
        message=message,
        digest="d",
    )


@pytest.fixture
def page() -> Iterator[tuple[str, ProgressPage]]:
    name, page = ProgressPage.create(2)
    yield name, page
    remove_segment(name)


def test_a_report_is_read_by_another_mapping_of_the_page(page: tuple[str, ProgressPage]) -> None:
    name, ours = page
    theirs = ProgressPage.open(name)
    assert [theirs.read(index) for index in range(2)] == [None, None]
    ours.write(1, state(3))
    assert [theirs.read(index) for index in range(2)] == [None, state(3)]
    ours.write(1, state(4, "wrong"))
    assert theirs.read(1) == state(4, "wrong")


def test_a_report_is_not_read_while_it_is_being_written(page: tuple[str, ProgressPage]) -> None:
    name, ours = page
    ours.write(1, state(1))
    raw = open_mapping(name, mmap.ACCESS_WRITE)
    (sequence,) = struct.unpack_from("<q", raw, SLOT_BYTES)
    struct.pack_into("<q", raw, SLOT_BYTES, sequence + 1)  # a writer has begun
    assert ours.read(1) is None
    struct.pack_into("<q", raw, SLOT_BYTES, sequence + 2)  # it has finished
    assert ours.read(1) == state(1) and ours.read(0) is None


@pytest.mark.parametrize(
    "character",
    ["x", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\x01", '"'],
    ids=["1", "3", "4", "control", "quote"],
)
def test_the_longest_message_stays_in_its_slot(page: tuple[str, ProgressPage], character: str) -> None:
    _, ours = page
    ours.write(1, state(7))
    ours.write(0, state(1, character * 100_000))
    assert ours.read(0) == state(1, character * 2000)
    assert ours.read(1) == state(7)


def test_lone_surrogates_in_a_message_are_replaced(
    page: tuple[str, ProgressPage],
) -> None:
    _, ours = page
    ours.write(0, state(1, "no file \udcff here"))
    assert ours.read(0) == state(1, "no file ? here")
