import asyncio
import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client.program_options import parse
from app.jobs import grpo, metrics
from app.jobs.options import JobOptions
from tests.fleet.deployed import Fleet
from tests.fleet.losing import kill_controller_when, process_of
from tests.fleet.talk import Reference, on_every_replica, served_checkpoint, train_and_publish
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.fleet("shared"),
    pytest.mark.timeout(600),
]
PROMPT = [5, 6, 7, 8, 9]


def wait_until_ready(client: httpx.Client, timeout_s: float = 120.0) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = client.get("/fleet")
            return answer.is_success and sum(each["admitted"] for each in answer.json()["members"]) == 2
        return False

    until(ready, timeout_s, "both replicas")


def in_a_thread(action: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=action, args=arguments)
    thread.start()
    return thread


def test_a_publish_whose_controller_dies_ends_with_a_version_that_is_served_and_stored(
    fleet: Fleet,
) -> None:
    with fleet.client(timeout_s=300) as client:
        train_and_publish(client)  # the journal exists
        before = fleet.version()
        killer = in_a_thread(kill_controller_when, fleet, "committed")
        version = train_and_publish(client)
        killer.join()
        wait_until_ready(client)
        assert version == fleet.version() == before + 1
        expected = Reference(served_checkpoint(fleet))(PROMPT, 16)
        for answer in on_every_replica(client, prompt=PROMPT, max_tokens=16).values():
            assert (answer.version, answer.token_ids) == (version, expected)
        until(lambda: client.get("/fleet").json()["stored_version"] == version, 30, "the report of the copy")


def test_an_rl_run_survives_its_controller_and_its_trainer(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(20)))
    record = tmp_path / "metrics.jsonl"
    options = parse(
        JobOptions,
        f"--url {fleet.url} --steps 6 --groups-per-step 2 --answers-per-group 4 --groups-in-flight 2 "
        f"--max-tokens 6 --prompts {prompts} --reward tests.app.jobs.example_rewards:length --extract whole "
        f"--metrics {record}".split(),
    )
    with fleet.client() as client:
        wait_until_ready(client)

    def stored() -> bool:
        """A trainer that dies before its version is stored leaves the run to its operator."""
        with fleet.client() as client:
            state = client.get("/fleet").json()  # an error, while a controller begins
        return "stored_version" in state and state["stored_version"] == state["committed_version"]

    done: list[int] = []  # steps when both were killed

    def kill_both() -> None:
        victims = [process_of(fleet, name) for name in ("controller", "trainer")]
        until(lambda: record.exists() and metrics.records(record) and stored(), 200, "step 1", pause_s=0.02)
        for victim in victims:
            victim.kill()
        done.append(len(metrics.records(record)))

    killer = in_a_thread(kill_both)
    asyncio.run(asyncio.wait_for(grpo.main(options, time.monotonic()), 400))
    killer.join()
    assert 0 < done[0] < 6, "the run went on without them"
    records = metrics.records(record)
    assert [each.step for each in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1].version == fleet.version()
    out = capsys.readouterr()
    print(out.out)
    assert "Traceback" not in out.out + out.err
