"""The HTTP surface, fuzzed from its own OpenAPI document: the real application over a fake controller."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.fuzzing import fuzz
from tests.app.http.serving import NoReplica, application, on_a_socket

pytestmark = pytest.mark.timeout(600)
TOKEN = "operator-0123456789"


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """The application on a socket, in a thread of its own; its address, and the headers of the operator."""
    token: str | None = request.param
    app = application(
        FakeController(), trainer=FakeTrainer(), token=token, router=NoReplica(), allow_pickled_ipc=True
    )
    with on_a_socket(app) as address:
        yield f"http://{address}", {} if token is None else {"authorization": f"Bearer {token}"}


@pytest.mark.slow
@pytest.mark.parametrize("served", [pytest.param(None, marks=pytest.mark.long), TOKEN], indirect=True)
def test_every_operation_answers_whatever_is_sent(
    served: tuple[str, dict[str, str]], record_property: Any
) -> None:
    url, headers = served
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    # Its answer does not end; what it takes is fuzzed below.
    tally = fuzz(url, document, headers=headers, skip=lambda path: path == "/fleet/events")
    print(f"{tally.requests} requests, {dict(tally.statuses)}, the slowest took {tally.slowest_s:.2f} s")
    assert tally.statuses[200] and tally.statuses[400]


@pytest.mark.slow
@pytest.mark.parametrize("served", [TOKEN], indirect=True)
def test_every_operation_needs_a_token(served: tuple[str, dict[str, str]]) -> None:
    url, headers = served
    document = httpx.get(f"{url}/openapi.json", headers=headers).json()
    operations = {path: list(found.values()) for path, found in document["paths"].items()}
    is_open = {path for path, found in operations.items() if all("security" not in each for each in found)}
    users = {"/finish_session", "/rollouts/{rollout_id}/reward", "/rollouts/{rollout_id}/discard"}
    assert is_open == {"/health", "/liveness"} | users, "users need none here"
    tally = fuzz(url, document, skip=lambda path: path in is_open, examples=2)
    # 400: what no server takes for a request.
    assert set(tally.statuses) <= {400, 401, 405}, tally
