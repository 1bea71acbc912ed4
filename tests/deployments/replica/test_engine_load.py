from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from app.http.prometheus import load_of
from deployments.replica.engine_load import KEPT, LoadLogger


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
