"""Requests made from an OpenAPI document, valid and not, and what must hold of every answer."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

LIMIT_S = 20.0  # of one answer
# More of them: SLIPSTREAM_FUZZ_EXAMPLES=1000 pytest tests/app/http/test_fuzz.py
EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ_EXAMPLES", "4"))  # of each operation, valid and not
SEED = int(os.environ.get("SLIPSTREAM_FUZZ_SEED", "1"))


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


def fuzz(
    url: str,
    document: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    skip: Callable[[str], bool] = lambda path: False,
    also_allowed: frozenset[int] = frozenset(),
    examples: int = EXAMPLES,
) -> Tally:
    """Send requests to every operation of a document.

    Args:
        url: where they are sent.
        skip: whether a path is left out.
        also_allowed: answers of 500 and above that are right there.

    Raises:
        AssertionError: an answer of 500 and above, a traceback, an error that is not JSON, or no answer.
    """
    tally, session = Tally(), requests.Session()
    session.headers.update(headers or {})
    schema = schemathesis.openapi.from_dict(dict(document))
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for result in schema.get_all_operations():
            if not isinstance(result, Ok):
                raise AssertionError(f"the document is wrong: {result.err()}")
            operation = result.ok()
            if skip(operation.path):
                continue
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(SEED)
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def send(case: Any) -> None:
                began = time.monotonic()
                answer = case.call(base_url=url, session=session, timeout=LIMIT_S)
                tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
                tally.statuses[answer.status_code] += 1
                judge(
                    f"{case.method} {case.formatted_path}", answer.status_code, answer.content, also_allowed
                )

            try:
                send()
            except Unsatisfiable:  # an operation that takes nothing cannot be given anything wrong
                assert mode is GenerationMode.NEGATIVE, operation.label
    return tally


def judge(what: str, status: int, content: bytes, also_allowed: frozenset[int] = frozenset()) -> None:
    """What must hold of every answer."""
    shown = f"{what}: {status} {content[:300]!r}"
    assert status < 500 or status in also_allowed, shown
    assert b"Traceback" not in content and b'"internal_error"' not in content, shown
    if status >= 400 and content:
        assert "error" in json.loads(content) or "detail" in json.loads(content), shown
