import json

import pytest

from app.client.program_options import parse
from examples.async_inflight import InflightOptions, scenario
from tests.fleet.deployed import Fleet
from tests.fleet.talk import ENGINE, ENVIRONMENT

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.long, pytest.mark.timeout(600)]


def test_requests_in_flight_continue_as_a_fresh_engine_would(fleet: Fleet) -> None:
    options = ["--url", fleet.url, "--requests", "12", "--tokens", "800", "--pause-after", "20"]
    options += ["--engine", json.dumps(ENGINE), "--environment", json.dumps(ENVIRONMENT)]
    outcomes = scenario(parse(InflightOptions, options))
    assert [outcome.fleet.differs_at for outcome in outcomes] == [None] * 12
    assert all(20 <= outcome.before < 800 == outcome.before + outcome.after for outcome in outcomes)
