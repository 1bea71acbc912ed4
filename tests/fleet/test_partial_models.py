"""Fleets whose checkpoint has more than the trainer's model: the trainer sends the rest as it is."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.talk import PROMPT, complete, fresh_engine, served_checkpoint, train_and_publish
from tests.tiny_models import save_tiny_tied_twice

pytestmark = [pytest.mark.serve, pytest.mark.fleet("partial"), pytest.mark.long, pytest.mark.timeout(600)]


def _start(root: Path) -> AbstractContextManager[Fleet]:
    return deployed("partial", save_tiny_tied_twice(root / "model", 5), root, {"engine": {"num_replicas": 1}})


# Not the vision-language model of the trainer's tests: vLLM's needs torchvision, which does not go with a
# torch for CPUs.
def test_a_trainer_of_a_part_of_a_checkpoint_publishes_whole_versions(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    partial = KEEPER.fleet("partial", tmp_path_factory, _start)
    with partial.client() as client:
        before = complete(client, max_tokens=16).token_ids
        for _ in range(2):
            train_and_publish(client)
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert (last["phase"], last["verification"]) == ("committed", "publisher")
        assert client.get("/train/status").json()["untrained"]
        (expected,) = fresh_engine(served_checkpoint(partial), [PROMPT], 16)
        assert complete(client, max_tokens=16).token_ids == expected != before
