from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from app.http.prometheus import load_of
from deployments.replica.engine_load import JUDGED, KEPT, LoadLogger


def test_drafts_count_for_the_version_that_made_them_and_few_versions_are_kept() -> None:
    engine = SimpleNamespace(version=0)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    counts = LoadLogger(config, [0], lambda: engine.version)
    step = SpecDecodingStats.new(3)
    step.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    for engine.version in range(KEPT + 2):
        counts.record(SchedulerStats(spec_decoding_stats=step), None)
        counts.record(SchedulerStats(), None)
        counts.record(None, None)
    text = generate_latest(REGISTRY).decode()
    load = load_of(text)
    assert load is not None and (load.drafted_tokens, load.accepted_tokens) == (3, 2)
    assert text.count("slipstream_drafted_tokens_total{") == KEPT
    assert text.count("slipstream_accepted_draft_tokens_total{") == KEPT


def test_drafting_is_stopped_for_a_version_of_which_too_little_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, stopped = SimpleNamespace(version=0), list[int]()
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    counts = LoadLogger(config, [0], lambda: engine.version, 0.3, stopped.append)

    def draft(accepted: int) -> bool:
        """Half of the tokens after which a version is judged. Whether drafting is off."""
        step = SpecDecodingStats(JUDGED, num_draft_tokens=JUDGED // 2, num_accepted_tokens=accepted)
        counts.record(SchedulerStats(spec_decoding_stats=step), None)
        load = load_of(generate_latest(REGISTRY).decode())
        assert load is not None
        return load.drafting_off

    enough, few = JUDGED * 3 // 20, JUDGED * 3 // 20 - 1
    assert [draft(0), draft(2 * enough), draft(0)] == [False, False, True], "0.3 until then, 0.2"
    assert draft(0) and stopped == [0], "a step of before the engine knew"
    assert "version 0: 300 of 1500 drafted tokens were accepted" in caplog.text
    engine.version = 1
    assert [draft(few), draft(few)] == [False, True] and stopped == [0, 1]
    engine.version = 2
    assert [draft(enough), draft(enough)] == [False, False] and stopped == [0, 1]
