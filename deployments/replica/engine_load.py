"""What vLLM's scheduler says after each step: the engine's load, and drafted tokens by version.

Drafting is stopped for a version of whose drafted tokens too few are accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from deployments.host.logs import serve_logger
from deployments.protocol.responses import ACCEPTED, DRAFTED, DRAFTING_OFF

KEPT = 8  # versions: each is a time series
JUDGED = 1000  # drafted tokens: the standard error of an acceptance of 0.1 is then 0.01

_DRAFTED = Counter(DRAFTED.removesuffix("_total"), "drafted tokens, by version", ["version"])
_ACCEPTED = Counter(ACCEPTED.removesuffix("_total"), "drafted tokens that were accepted", ["version"])
_DRAFTING_OFF = Gauge(DRAFTING_OFF, "1 while nothing is drafted, for too little was accepted")

logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int
    waiting: int
    places: int  # sum of `max_num_seqs` over all ranks
    kv_use: float  # share of KV cache blocks in use of the fullest rank, 0 to 1


class LoadLogger(AggregateStatLoggerBase):
    """vLLM does not say which version made a step: drafts count for the replica's when they arrive, so those
    of the step before a commit may count for the next version."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: list[int],
        version: Callable[[], int],
        min_acceptance: float = 0.0,
        stop_drafting: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._newest = {index: SchedulerStats() for index in engine_indexes}
        self._version = version
        self._drafts: dict[int, tuple[int, int]] = {}  # by version, oldest first: drafted, accepted tokens
        self._min_acceptance, self._stop_drafting = min_acceptance, stop_drafting
        self._off: int | None = None  # the version with which drafting was stopped
        _DRAFTING_OFF.set_function(lambda: self._off == version())

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self._newest[engine_idx] = scheduler_stats
        if (drafts := scheduler_stats.spec_decoding_stats) is None:
            return
        version = self._version()
        _DRAFTED.labels(str(version)).inc(drafts.num_draft_tokens)
        _ACCEPTED.labels(str(version)).inc(drafts.num_accepted_tokens)
        drafted, accepted = self._drafts.get(version, (0, 0))
        drafted, accepted = drafted + drafts.num_draft_tokens, accepted + drafts.num_accepted_tokens
        self._drafts[version] = drafted, accepted
        while len(self._drafts) > KEPT:
            oldest = next(iter(self._drafts))
            del self._drafts[oldest]
            _DRAFTED.remove(str(oldest))
            _ACCEPTED.remove(str(oldest))
        if self._off != version and drafted >= JUDGED and accepted < self._min_acceptance * drafted:
            self._off = version
            logger.warning(
                "version %d: %d of %d drafted tokens were accepted, engine.min_draft_acceptance is %g: "
                "drafting is off until the next version",
                *(version, accepted, drafted, self._min_acceptance),
            )
            self._stop_drafting(version)

    def log_engine_initialized(self) -> None:
        pass

    @property
    def load(self) -> EngineLoad:
        ranks = list(self._newest.values())
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs + rank.num_skipped_waiting_reqs for rank in ranks),
            places=self._max_num_seqs * len(ranks),
            kv_use=max(rank.kv_cache_usage for rank in ranks),
        )


def watch_load(
    llm: AsyncLLM, version: Callable[[], int], min_acceptance: float, stop_drafting: Callable[[int], None]
) -> LoadLogger:
    """All zero if statistics are disabled. `min_acceptance`: of drafted tokens; with less, `stop_drafting` is
    called with the version, once."""
    manager = llm.logger_manager
    ranks = range(llm.vllm_config.parallel_config.data_parallel_size)
    indexes = [*ranks] if manager is None else manager.engine_indexes
    watching = LoadLogger(llm.vllm_config, indexes, version, min_acceptance, stop_drafting)
    if manager is not None:
        manager.stat_loggers.append(watching)
    return watching
