import pytest

from tests.clients.environments import run
from tests.fleet.adapter_fleet import SLOTS, Adapted
from tests.fleet.adapter_talk import unload
from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import complete, served_checkpoint

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("shared"),
    pytest.mark.long,
    pytest.mark.timeout(1200),
]
STEPS = 24
PROMPTS = [[5 + row, 6, 7 + 2 * row, 8] for row in range(12)]


def test_the_calls_of_its_client(fleet: Fleet) -> None:
    found = run("trl", "trl_client", fleet.url, prompts=PROMPTS)
    assert (found["model"], found["world_size"], found["backend"]) == (MODEL, 2, "shm")
    assert found["prompt_ids"] == PROMPTS
    with fleet.client() as client:
        expected = [complete(client, prompt, 6, ignore_eos=False).token_ids for prompt in PROMPTS]
    assert found["completion_ids"] == expected
    assert [len(row) for row in found["logprobs"]] == [len(ids) for ids in expected]
    assert len(found["sampled"]) == 2 * len(PROMPTS) and len(found["chatted"]) == 2


@pytest.mark.fleet("gloo")
def test_async_grpo_trains_an_adapter_on_all_replicas(adapted: Adapted) -> None:
    output = adapted.root / "trl"
    found = run(
        "trl",
        "trl_async_grpo",
        adapted.fleet.url,
        checkpoint=str(served_checkpoint(adapted.fleet)),
        output=str(output),
        steps=STEPS,
        max_staleness=SLOTS - 2,
        timeout_s=900,
    )
    print(found)
    assert found["adapter_only"] and found["version"] == STEPS + 1
    first, last = found["rewards"][:3], found["rewards"][-3:]
    assert sum(last) / 3 > sum(first) / 3 + 0.1  # from one half; the noise of a mean is 0.02
    with adapted.fleet.client() as client:
        held = client.get("/fleet/adapters").json()["adapters"]
        for name in {each["name"] for each in held}:
            unload(client, name)
    assert {each["name"] for each in held} == {f"trl-policy-v{STEPS + 1 - age}" for age in range(SLOTS - 1)}
