from pathlib import Path

import pytest
import torch

from tests.fleet.gpu_fleets import (
    INVARIANT,
    check_against_a_fresh_engine,
    configuration,
    fresh_answers,
    needs_gpus,
    running,
)
from tests.fleet.talk import PROMPT, complete, on_every_replica, train_and_publish
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
FP8_PORT = 8373
TWO_PORTS = {"device": 8374, "none": 8376}
TOKENS = 24
PROMPTS = [PROMPT, [40, 41, 42], list(range(10, 30))]


@needs_gpus(3)
def test_fp8_at_tp_2_ends_where_a_fresh_fp8_engine_begins(tmp_path: Path) -> None:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1, width=256, dtype=torch.bfloat16)
    config = configuration("nccl_tp", checkpoint, tmp_path / "state", {"engine": {"enforce_eager": True}})
    with running(config, checkpoint, FP8_PORT) as fleet, fleet.client() as client:
        before = [complete(client, prompt, TOKENS).token_ids for prompt in PROMPTS]
        for _ in range(3):
            version = train_and_publish(client)
        print("last round", client.get("/fleet/rounds").json()["rounds"][-1])
        saved = Path(client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"])
        after = [complete(client, prompt, TOKENS) for prompt in PROMPTS]
        assert {answer.version for answer in after} == {version} == {3}
        expected = fresh_answers(config, saved, PROMPTS, TOKENS)
        assert [answer.token_ids for answer in after] == expected
        assert all(old != new for old, new in zip(before, expected, strict=True))


@needs_gpus(3)
@pytest.mark.parametrize("staging", TWO_PORTS)
def test_one_broadcast_reaches_two_replicas_that_end_where_a_fresh_engine_begins(
    tmp_path: Path, staging: str
) -> None:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1, heads=2, dtype=torch.bfloat16)
    overrides = {"engine": {"env": INVARIANT, "enforce_eager": True}, "weights": {"staging": staging}}
    config = configuration("nccl_two_replicas", checkpoint, tmp_path / "state", overrides)
    with running(config, checkpoint, TWO_PORTS[staging]) as fleet, fleet.client() as client:
        before = on_every_replica(client, max_tokens=TOKENS)
        for _ in range(3):
            version = train_and_publish(client)
        reached = check_against_a_fresh_engine(client, config, tmp_path / "saved", before, TOKENS)
        assert reached == version == 3
