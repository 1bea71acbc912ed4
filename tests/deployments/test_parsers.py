"""Whatever a parser is given, it reads it or refuses it with the one error that it promises.

More examples: SLIPSTREAM_FUZZ_EXAMPLES=5000 pytest tests/deployments/test_parsers.py
"""

import json
import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.settings.security import read_tokens
from deployments.controller.journal import NAME, Journal, JournalError
from deployments.ledger.decisions import Labelled, LeaseIssued, Started, encode
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.routing import demand_of
from deployments.replica.spans import SpanRecorder, annotate_events, annotate_json
from deployments.weights.store.versions import VersionManifest
from deployments.weights.wire.chunk_layout import layout
from trainers.trajectory import parse_trajectories

pytestmark = pytest.mark.slow  # searches

EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ_EXAMPLES", "60"))
fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, 1e308, 1e-308, -0.0, float("inf"), float("nan")])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NUMBERS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def objects_with(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, each of anything."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON))


# -- headers, tokens; `tests/app/http/test_fuzz.py` has bodies --------------------------------------


@given(
    st.dictionaries(st.sampled_from(["x-min-weight-version", "x-weight-timeout", "x-session-id"]), st.text())
)
@fuzzed
def test_headers(headers: dict[str, str]) -> None:
    with suppress(InvalidRequest):
        demand = demand_of(headers, 5.0)
        assert 0 <= demand.min_version <= 10**9 and 0 <= demand.timeout_s <= 10**9


@given(st.text())
@fuzzed
def test_tokens(text: str) -> None:
    with suppress(ValueError):
        assert all(len(token) >= 16 and token.isascii() for token in read_tokens(text))


# -- weights ---------------------------------------------------------------------------------------

LISTS = st.lists(JSON, max_size=4)
SHAPES = st.lists(st.lists(st.integers(-1, 2**40) | SCALARS, max_size=5) | SCALARS, max_size=3)


@given(
    LISTS | st.lists(st.text(max_size=3), max_size=3),
    LISTS
    | st.lists(st.sampled_from(["float32", "bfloat16", "load", "Tensor", "bits8", "qint8"]), max_size=3),
    SHAPES,
    st.integers(1, 2**40),
)
@fuzzed
def test_chunk_layouts(names: Any, dtypes: Any, shapes: Any, chunk_bytes: int) -> None:
    try:
        chunks = layout(names, dtypes, shapes, chunk_bytes)
    except ValueError:
        return
    assert [entry.name for chunk in chunks for entry in chunk.entries] == list(names)
    for chunk in chunks:
        ends = [0]
        for entry in chunk.entries:
            assert entry.offset >= ends[-1] and entry.size_bytes >= 0
            ends.append(entry.offset + entry.size_bytes)
        assert chunk.table_offset >= ends[-1]


@given(
    JSON.map(json.dumps)
    | st.binary(max_size=60)
    | objects_with("version", "tensors", "label").map(json.dumps)
)
@fuzzed
def test_manifests(text: str | bytes) -> None:
    with suppress(ValueError):
        VersionManifest.decode(text)


TRAJECTORY = objects_with("prompt_token_ids", "token_ids", "logprobs", "advantage", "weight_versions")
SPAN = objects_with("version", "start", "end")
NEARLY = st.fixed_dictionaries(
    {
        "prompt_token_ids": st.just([1]) | JSON,
        "token_ids": st.just([2, 3]) | JSON,
        "logprobs": st.just([-0.5, -1.0]) | st.lists(SCALARS, min_size=2, max_size=2),
        "advantage": SCALARS,
        "weight_versions": st.lists(SPAN, max_size=2)
        | st.lists(st.fixed_dictionaries({"version": JSON, "start": JSON, "end": JSON}), max_size=1),
    }
)


@given(JSON | st.lists(TRAJECTORY | NEARLY, max_size=3))
@fuzzed
def test_trajectories(entries: Any) -> None:
    with suppress(ValueError):
        for trajectory in parse_trajectories(entries, vocabulary_size=10, max_length=8):
            assert len(trajectory) <= 8


# -- files -----------------------------------------------------------------------------------------

DECISIONS = (Started(generation=1), LeaseIssued(token=1, publisher="t"), Labelled(version=1, label="x"))
LINES = [encode(each) for each in DECISIONS]
DECISION = objects_with("decision", "kind", "type", "token", "round_id", "version", "participants", "label")


@given(
    st.lists(
        st.sampled_from(LINES)
        | st.binary(max_size=30)
        | JSON.map(lambda v: json.dumps(v).encode())
        | DECISION.map(lambda v: json.dumps(v).encode()),
        max_size=5,
    ),
    st.integers(0, 1 << 16),
    st.binary(max_size=8),
)
@fuzzed
def test_journals(lines: list[bytes], at: int, damage: bytes) -> None:
    """Rows that somebody edited, and bytes that somebody wrote over others."""
    with tempfile.TemporaryDirectory() as directory:
        Journal(Path(directory)).close()
        with closing(sqlite3.connect(Path(directory, NAME), isolation_level=None)) as db:
            db.executemany("INSERT INTO decisions (decision) VALUES (?)", [(line,) for line in lines])
        content = Path(directory, NAME).read_bytes()
        content = content[: at % len(content)] + damage + content[at % len(content) + len(damage) :]
        Path(directory, NAME).write_bytes(content)
        with suppress(JournalError):
            Journal(Path(directory)).close()


# -- answers of an engine --------------------------------------------------------------------------

ANSWER = objects_with("choices", "error", "detail", "weight_version")


@given(
    (JSON | ANSWER).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60),
    st.sampled_from([200, 400, 404, 500]),
)
@fuzzed
def test_answers_of_an_engine(body: bytes, status: int) -> None:
    recorder = SpanRecorder(3)
    recorder.record(0, [{"version": 4, "start": 0, "end": 2}])
    assert isinstance(annotate_json(body, recorder, status), bytes)
    annotate_events(b"data: " + body + b"\n\ndata: [DONE]\n\n", recorder)
