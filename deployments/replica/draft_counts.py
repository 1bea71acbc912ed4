"""Drafted and accepted tokens of speculative decoding, by the replica's version."""

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter
from vllm.v1.metrics.loggers import StatLoggerBase

from deployments.protocol.responses import ACCEPTED, DRAFTED

KEPT = 8  # versions: each is a time series

_DRAFTED = Counter(DRAFTED.removesuffix("_total"), "drafted tokens, by version", ["version"])
_ACCEPTED = Counter(ACCEPTED.removesuffix("_total"), "drafted tokens that were accepted", ["version"])
_known: dict[str, None] = {}  # labels, oldest first


class DraftCounts(StatLoggerBase):
    """vLLM does not say which version made a step: it is the replica's when the counts arrive, so the step
    before a commit may count for the next version."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if drafts is None:
            return
        version = str(self._version())
        _DRAFTED.labels(version).inc(drafts.num_draft_tokens)
        _ACCEPTED.labels(version).inc(drafts.num_accepted_tokens)
        _known.setdefault(version)
        while len(_known) > KEPT:
            oldest = next(iter(_known))
            del _known[oldest]
            _DRAFTED.remove(oldest)
            _ACCEPTED.remove(oldest)

    def log_engine_initialized(self) -> None:
        """Not logged."""
