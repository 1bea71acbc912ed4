"""LoRA adapters that a trainer sends over Gloo to a fleet of real engines."""

from pathlib import Path

import httpx
import pytest

from tests.fleet.adapter_fleet import Adapted
from tests.fleet.adapter_talk import COUNT, Merged, checkpoint_of_now, entries, everywhere, tokens
from tests.fleet.adapter_trainer import LORA, adapter_trainer
from tests.fleet.losing import kill_a_replica, members, wait_for_another
from tests.fleet.talk import PROMPT

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


@pytest.mark.chaos
@pytest.mark.parametrize("adapted", ["gloo"], indirect=True)
def test_an_adapter_over_gloo_is_on_both_replicas_and_a_successor_reads_the_stores_copy(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base = checkpoint_of_now(adapted, client, tmp_path / "base")
    with adapter_trainer(adapted) as trainer:
        for _ in range(2):  # over one connection
            trainer.step(client)
            report = trainer.publish()
            print(f"transfer {report.transfer_s} s of {report.duration_s:.3f} s")
            assert report.transfer_s is not None
            [status] = [each for each in entries(client) if each["digest"] == report.digest]
            assert set(status["received"]) == set(status["replicas"]) and len(status["replicas"]) == 2
        expected = Merged(base, trainer.save(tmp_path / "saved"))(PROMPT, COUNT)
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [expected] * 2
        before = members(client)
        kill_a_replica("adapters")
        wait_for_another(client, before)
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [expected] * 2
        [status] = [each for each in entries(client) if each["digest"] == report.digest]
        assert set(status["received"]) == before & set(status["replicas"])
        trainer.step(client)
        assert trainer.publish().transfer_s is not None, "to the fleet as it is now"
