"""An operator who changes directories while they are published."""

import json
import random
import time
from collections import Counter
from contextlib import suppress

import pytest
from safetensors.torch import save

from tests.chaos.arena import Arena, beside, watched
from tests.chaos.faults import Action, Case, Phase
from tests.chaos.marked_weights import save_marked, tensors
from tests.chaos.striking import strike

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("arena"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


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
