"""The HTTP surface, fuzzed from its own OpenAPI document: the real application over a fake controller."""

from typing import Any

import httpx
import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.fuzzing import fuzz
from tests.app.http.serving import NoReplica, application, client, on_a_socket

TOKEN = "operator-0123456789"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
OPTIONS: dict[str, Any] = {"token": TOKEN, "router": NoReplica(), "allow_pickled_ipc": True}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_operation_answers_whatever_is_sent() -> None:
    with on_a_socket(application(FakeController(), trainer=FakeTrainer(), **OPTIONS)) as address:
        url = f"http://{address}"
        document = httpx.get(f"{url}/openapi.json", headers=HEADERS).json()
        # Its answer does not end.
        tally = fuzz(url, document, headers=HEADERS, skip=lambda path: path == "/fleet/events")
    print(f"{tally.requests} requests, {dict(tally.statuses)}, the slowest took {tally.slowest_s:.2f} s")
    assert tally.statuses[200] and tally.statuses[400]


@pytest.mark.slow  # the whole document
async def test_every_operation_needs_a_token() -> None:
    async with client(FakeController(), trainer=FakeTrainer(), **OPTIONS) as fleet:
        document = (await fleet.get("/openapi.json", headers=HEADERS)).json()
        is_open = set()
        for path, operations in document["paths"].items():
            if path == "/fleet/events":  # its answer does not end; `test_auth` has it
                continue
            statuses = {(await fleet.request(method, path)).status_code for method in operations}
            if statuses != {401}:
                is_open.add(path)
            assert (path in is_open) == all("security" not in each for each in operations.values()), path
    users = {"/finish_session", "/rollouts/{rollout_id}/reward", "/rollouts/{rollout_id}/discard"}
    assert is_open == {"/health", "/liveness"} | users, "users need none here"
