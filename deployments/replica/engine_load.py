"""What vLLM's scheduler says after each step: the engine's load, and drafted tokens by version."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from deployments.protocol.responses import ACCEPTED, DRAFTED

KEPT = 8  # versions: each is a time series

_DRAFTED = Counter(DRAFTED.removesuffix("_total"), "drafted tokens, by version", ["version"])
_ACCEPTED = Counter(ACCEPTED.removesuffix("_total"), "drafted tokens that were accepted", ["version"])


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
        self, vllm_config: VllmConfig, engine_indexes: list[int], version: Callable[[], int]
    ) -> None:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._newest = {index: SchedulerStats() for index in engine_indexes}
        self._version = version
        self._drafting: dict[str, None] = {}  # versions with a time series, oldest first

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
        version = str(self._version())
        _DRAFTED.labels(version).inc(drafts.num_draft_tokens)
        _ACCEPTED.labels(version).inc(drafts.num_accepted_tokens)
        self._drafting.setdefault(version)
        while len(self._drafting) > KEPT:
            oldest = next(iter(self._drafting))
            del self._drafting[oldest]
            _DRAFTED.remove(oldest)
            _ACCEPTED.remove(oldest)

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


def watch_load(llm: AsyncLLM, version: Callable[[], int]) -> LoadLogger:
    """All zero if statistics are disabled."""
    ranks = list(range(llm.vllm_config.parallel_config.data_parallel_size))
    if llm.logger_manager is None:
        return LoadLogger(llm.vllm_config, ranks, version)
    watching = LoadLogger(llm.vllm_config, llm.logger_manager.engine_indexes, version)
    llm.logger_manager.stat_loggers.append(watching)
    return watching
