"""How busy an engine is, from what vLLM's scheduler says with every step."""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of all data-parallel ranks together."""

    running: int  # requests in the batch
    waiting: int  # requests without a place in it
    places: int  # that it has at most
    kv_use: float  # the fullest rank's share of KV cache blocks in use, 0 to 1


class LoadLogger(AggregateStatLoggerBase):
    """Keeps the newest numbers of each data-parallel rank."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._newest = {index: SchedulerStats() for index in engine_indexes}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._newest[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        """Nothing to print."""

    @property
    def load(self) -> Load:
        ranks = list(self._newest.values())
        return Load(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs + rank.num_skipped_waiting_reqs for rank in ranks),
            places=self._max_num_seqs * len(ranks),
            kv_use=max(rank.kv_cache_usage for rank in ranks),
        )


def watch_load(llm: AsyncLLM) -> LoadLogger:
    """Begin to keep what this engine's scheduler says. It says nothing if its statistics are switched off."""
    ranks = list(range(llm.vllm_config.parallel_config.data_parallel_size))
    if llm.logger_manager is None:
        return LoadLogger(llm.vllm_config, ranks)
    watching = LoadLogger(llm.vllm_config, llm.logger_manager.engine_indexes)
    llm.logger_manager.stat_loggers.append(watching)
    return watching
