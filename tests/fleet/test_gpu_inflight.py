"""Layout 5: requests in flight, pause, update, resume; every continuation is that of a fresh engine."""

import json
from pathlib import Path

import pytest

from app.client.program_options import parse
from app.main import engine_spec
from examples.async_inflight import InflightOptions, scenario
from examples.comparison import AnswerComparison
from tests.fleet.gpu_fleets import INVARIANT, needs_gpus, tiny_fleet

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]
REQUESTS = 24


@pytest.mark.parametrize(
    ("layout", "port"),
    [
        pytest.param("async_inflight", 8356, marks=needs_gpus(2)),
        pytest.param("ipc", 8357, marks=needs_gpus(1)),
    ],
)
def test_every_continuation_is_that_of_a_fresh_engine(layout: str, port: int, tmp_path: Path) -> None:
    with tiny_fleet(layout, tmp_path, port, {"engine": {"env": INVARIANT}}) as (fleet, _, config):
        engine = engine_spec(config, "").arguments | {"load_format": "auto"}
        options = ["--url", fleet.url, "--requests", str(REQUESTS), "--tokens", "400", "--pause-after", "64"]
        options += ["--engine", json.dumps(engine), "--environment", json.dumps(INVARIANT)]
        # The same weights first: what drifts there is not a rest of old ones.
        show("the same weights", scenario(parse(InflightOptions, [*options, "--no-train"])))
        outcomes = scenario(parse(InflightOptions, options))
    show("new weights", outcomes)
    assert [outcome.fleet.differs_at for outcome in outcomes] == [None] * REQUESTS
    assert all(64 <= outcome.before < 400 == outcome.before + outcome.after for outcome in outcomes)


def show(what: str, outcomes: list[AnswerComparison]) -> None:
    print(f"{what}: tokens before the switch: {[outcome.before for outcome in outcomes]}")
    print("not the same:", *(outcome for outcome in outcomes if outcome.fleet.drifting), sep="\n")
