"""An operator who changes directories while they are published, or starts a second fleet on the store."""

import json
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import save

from tests.chaos.arena import Arena, beside, watched
from tests.chaos.faults import Action, Case, Phase
from tests.chaos.launching import SETTINGS, launch
from tests.chaos.marked_weights import save_marked, tensors
from tests.chaos.striking import strike
from tests.fleet.deployed import merged

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("arena"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


def test_a_second_fleet_on_the_store_is_refused_and_takes_nothing(arena: Arena, tmp_path: Path) -> None:
    store = arena.launched.state / "store"
    changes = {"store": {"path": str(store)}, "engine": {"num_replicas": 1}, "trainer": None}
    with watched(arena):
        fleet = arena.fleet()
        assert fleet is not None
        with arena.quiet():
            before = {store / "fleet.json", *store.glob("v*/*")}
            with (
                pytest.raises(AssertionError, match=f"belongs to fleet {fleet['fleet_id']}"),
                launch(tmp_path, arena.launched.model, merged(SETTINGS, changes)),
            ):
                pass
        assert all(path.exists() for path in before), "it removed what is the first one's"


def test_a_directory_that_is_rewritten_and_moved_is_one_version_or_none(arena: Arena) -> None:
    """And the trainer is killed while its version is written to the store."""
    directory = save_marked(arena.launched.published / "checkpoint", 1)
    contents = [save(tensors(arena.next_mark()), {"format": "pt"}) for _ in range(8)]
    (directory / "model.safetensors").write_bytes(contents[0])
    draw = random.Random(1)

    def rewrite() -> None:
        content = draw.choice(contents)
        with suppress(FileNotFoundError), (directory / "model.safetensors").open("r+b") as file:
            for begin in range(0, len(content), 1 << 16):
                file.write(content[begin : begin + (1 << 16)])
                file.flush()
                time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 4.0))

    def move() -> None:
        time.sleep(draw.uniform(0.5, 4.0))
        directory.rename(directory.with_name("aside"))
        time.sleep(draw.uniform(0.0, 0.2))
        directory.with_name("aside").rename(directory)

    with watched(arena), beside(rewrite, move):
        statuses: Counter[int] = Counter()
        with arena.quiet():
            for _ in range(30):
                statuses[arena.ask("POST", "/fleet/publish", json={"path": str(directory)})] += 1
        strike(arena, Case(targets=("trainer",), action=Action.KILL, phase=Phase.STORING))
    print(json.dumps({"publishes of a directory that changes": statuses}), flush=True)
    assert statuses[200] and set(statuses) <= {200, 400, 409}, statuses
