from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fleet.gpu_fleets import INVARIANT, check_three_rounds, needs_gpus, tiny_fleet, trainers_answers
from tests.fleet.talk import PROMPT, complete, train_and_publish
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
FP8_PORT = 8373
TWO_PORTS = {"device": 8374, "none": 8376}
TOKENS = 24
PROMPTS = [PROMPT, [40, 41, 42], list(range(10, 30))]


@needs_gpus(3)
def test_fp8_at_tp_2_ends_where_a_fresh_fp8_engine_begins(tmp_path: Path) -> None:
    save = partial(save_tiny_llama, seed=1, width=256, dtype=torch.bfloat16)
    with tiny_fleet("nccl_tp", tmp_path, FP8_PORT, {"engine": {"enforce_eager": True}}, save) as made:
        client = made.client
        before = [complete(client, prompt, TOKENS).token_ids for prompt in PROMPTS]
        for _ in range(3):
            version = train_and_publish(client)
        print("last round", client.get("/fleet/rounds").json()["rounds"][-1])
        after = [complete(client, prompt, TOKENS) for prompt in PROMPTS]
        assert {answer.version for answer in after} == {version} == {3}
        expected = trainers_answers(made, tmp_path, TOKENS, PROMPTS)
        assert [answer.token_ids for answer in after] == expected
        assert all(old != new for old, new in zip(before, expected, strict=True))


@needs_gpus(3)
@pytest.mark.parametrize("staging", TWO_PORTS)
def test_one_broadcast_reaches_two_replicas_that_end_where_a_fresh_engine_begins(
    tmp_path: Path, staging: str
) -> None:
    overrides = {"engine": {"env": INVARIANT, "enforce_eager": True}, "weights": {"staging": staging}}
    check_three_rounds("nccl_two_replicas", tmp_path, TWO_PORTS[staging], overrides, count=2)
