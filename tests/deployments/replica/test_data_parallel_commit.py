"""A commit on two data-parallel ranks: vLLM's own busy loops, schedulers and agreement, in two threads.

Only the model is missing. Its collectives are a barrier: a rank's forward pass waits for the other's.
"""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import Any

import pytest
from torch.distributed import HashStore, ProcessGroupGloo
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState
from vllm.v1.outputs import ModelRunnerOutput

from deployments.replica import engine_core
from deployments.replica.engine_core import COMMIT
from tests.deployments.replica.bare_core import Core, config_of

RANKS = 2
INTERVAL = 4  # steps between two agreements
TOKENS = 32  # of each request
LIMIT_S = 30.0


@dataclass
class Workers:
    """A rank's executor.

    Attributes:
        passes: the weights of each forward pass, and how many requests it computes.
        during: what else happens during a forward pass, counted from 1.
    """

    barrier: Barrier
    fails: bool = False
    is_sleeping: bool = False
    version: str = "7"
    passes: list[tuple[str, int]] = field(default_factory=list)
    during: dict[int, Callable[[], None]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def execute_model(self, scheduled: Any, non_block: bool) -> Future[Any]:
        self.names = list(scheduled.num_scheduled_tokens)
        if self.names:
            self._forward()
        return _done(None if self.names else ModelRunnerOutput(req_ids=[], req_id_to_index={}))

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        output = ModelRunnerOutput(
            req_ids=self.names,
            req_id_to_index={name: index for index, name in enumerate(self.names)},
            sampled_token_ids=[[5] for _ in self.names],
        )
        return _done(output) if non_block else output

    def execute_dummy_batch(self) -> None:
        self.names = []
        self._forward()

    def _forward(self) -> None:
        self.passes.append((self.version, len(self.names)))
        self.during.get(len(self.passes), lambda: None)()
        self.barrier.wait(LIMIT_S)

    def collective_rpc(self, method: str) -> None:
        if method == "finish_weight_update":
            if self.fails:
                raise RuntimeError("no memory")
            self.version = "8"

    def reset_encoder_cache(self) -> None: ...


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Rank(Core):
    """A data-parallel engine core."""

    kind = DPEngineCoreProc

    def __init__(self, config: VllmConfig, barrier: Barrier, store: HashStore, rank: int) -> None:
        super().__init__(config)
        core, self.workers = self.core, Workers(barrier)
        core.model_executor, core.vllm_config, core.log_stats = self.workers, config, False
        core.engine_index = core.dp_rank = rank
        core.dp_size, core.dp_sync_interval, core.prefill_schedule_interval = RANKS, INTERVAL, 1
        core.dp_group = ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=LIMIT_S))
        core.has_coordinator = core.publish_dp_lb_stats = core.enable_fault_tolerance = False
        core.step_counter = core.current_wave = 0
        core.pending_pause = core.ignore_start_dp_wave = core.reject_new_requests = False
        core.eep_scaling_state = None
        core.process_input_queue_block, core.shutdown_state = True, EngineShutdownState.RUNNING
        core.output_queue, core.aborts_queue = queue.Queue(), queue.Queue()
        core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
        core.async_scheduling = config.scheduler_config.async_scheduling
        core.step_fn = core.step
        if core.async_scheduling:
            core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
            core.step_fn = core.step_with_batch_queue
        self.labels: list[str] = []  # the version of each token

    def send(self, name: str) -> None:
        self.core.input_queue.put((EngineCoreRequestType.ADD, (self.receive(name), 0)))

    def join(self) -> None:
        """What the coordinator says when another rank has begun."""
        self.core.input_queue.put((EngineCoreRequestType.START_DP_WAVE, (0, None)))

    def call(self, utility: str, *arguments: Any) -> None:
        self.core.input_queue.put((EngineCoreRequestType.UTILITY, (0, 1, utility, arguments)))

    def commit(self, *, resume: bool = True) -> None:
        self.call(COMMIT, "8", False, resume)

    def failure(self) -> str | None:
        """Waits for the answer of a call."""
        while (outputs := self._take()).utility_output is None:
            pass
        message: str | None = outputs.utility_output.failure_message
        return message

    def finish(self) -> list[str]:
        while len(self.labels) < TOKENS:
            self._take()
        return self.labels

    def _take(self) -> Any:
        _, outputs = self.core.output_queue.get(timeout=LIMIT_S)
        self.labels += [outputs.weight_version for each in outputs.outputs for _ in each.new_token_ids]
        return outputs

    def run(self) -> None:
        with pytest.raises(SystemExit):
            self.core.run_busy_loop()

    def stop(self) -> None:
        self.core.shutdown_state = EngineShutdownState.REQUESTED
        self.core.input_queue.put((EngineCoreRequestType.WAKEUP, None))


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "a step ahead"])
def config(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> VllmConfig:
    engine_core.install()
    return config_of(tmp_path_factory.mktemp("model"), a_step_ahead=request.param)


@pytest.fixture
def ranks(config: VllmConfig) -> Iterator[list[Rank]]:
    barrier, store = Barrier(RANKS), HashStore()
    with ThreadPoolExecutor(RANKS) as pool, set_current_vllm_config(config):
        made = list(pool.map(partial(Rank, config, barrier, store), range(RANKS)))
        loops = [pool.submit(rank.run) for rank in made]
        yield made
        for rank in made:
            rank.stop()
        for loop in loops:
            loop.result(LIMIT_S)


def versions(rank: Rank) -> list[str]:
    return [version for version, _ in rank.workers.passes]


def test_busy_ranks_swap_before_the_same_step_and_compute_requests_until_then(ranks: list[Rank]) -> None:
    """The call reaches the second rank after an agreement that the first one has waited for."""
    for rank, step in zip(ranks, (2 * INTERVAL - 1, 2 * INTERVAL + 1), strict=True):
        rank.workers.during[step] = rank.commit
        rank.send("a")
    old = 3 * INTERVAL
    for rank in ranks:
        assert rank.failure() is None
        assert rank.finish() == ["7"] * old + ["8"] * (TOKENS - old)
        assert rank.workers.passes[:TOKENS] == [("7", 1)] * old + [("8", 1)] * (TOKENS - old)
        assert not rank.core.scheduler.has_unfinished_requests()


def test_rank_without_requests_swaps_before_the_same_step(ranks: list[Rank]) -> None:
    busy, idle = ranks
    busy.workers.during[INTERVAL + 1] = busy.commit
    idle.workers.during[INTERVAL - 1] = idle.commit
    busy.send("a")
    idle.join()
    assert busy.failure() is idle.failure() is None
    old = 2 * INTERVAL
    assert busy.finish() == ["7"] * old + ["8"] * (TOKENS - old)
    assert versions(busy)[:TOKENS] == versions(idle)[:TOKENS]


def test_idle_group_commits_after_one_dummy_step(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.commit()
    for rank in ranks:
        assert rank.failure() is None and rank.workers.passes == [("7", 0)]
    for rank in ranks:
        rank.send("a")
    for rank in ranks:
        assert rank.finish() == ["8"] * TOKENS


def test_group_that_has_aborted_its_requests_commits_and_begins_those_that_came_meanwhile(
    ranks: list[Rank],
) -> None:
    for rank in ranks:
        rank.workers.during[1] = partial(rank.call, "pause_scheduler", "abort", False)
        rank.send("a")
    for rank in ranks:
        assert rank.failure() is None
        rank.labels.clear()
        rank.send("b")
    for rank in ranks:
        rank.commit()
    for rank in ranks:
        assert rank.failure() is None
        assert rank.finish() == ["8"] * TOKENS


def test_held_group_takes_no_step_until_it_is_resumed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.workers.during[1] = partial(rank.commit, resume=False)
        rank.send("a")
    for rank in ranks:
        assert rank.failure() is None
        rank.send("b")
        rank.join()
        assert versions(rank) == ["7"] * INTERVAL and rank.labels == ["7"] * INTERVAL
    for rank in ranks:
        rank.call("resume_scheduler")
    for rank in ranks:
        assert rank.failure() is None
        assert rank.finish()[INTERVAL:] == ["8"] * (TOKENS - INTERVAL)


def test_no_rank_computes_after_one_that_did_not_swap(ranks: list[Rank]) -> None:
    ranks[1].workers.fails = True
    for rank in ranks:
        rank.workers.during[1] = rank.commit
        rank.send("a")
    assert "another data-parallel rank did not swap" in (ranks[0].failure() or "")
    assert "no memory" in (ranks[1].failure() or "")
    for rank in ranks:
        rank.join()
        rank.call("is_scheduler_paused")
    for rank in ranks:
        assert rank.failure() is None and versions(rank) == ["7"] * INTERVAL


def test_commit_is_refused_while_the_scheduler_is_being_paused(ranks: list[Rank]) -> None:
    """The ranks could take the agreement upon one for that upon the other."""
    ranks[0].workers.during[1] = lambda: (ranks[0].call("pause_scheduler", "keep", False), ranks[0].commit())
    for rank in ranks:
        rank.send("a")
    assert "the scheduler is being paused" in (ranks[0].failure() or "")
    ranks[1].call("pause_scheduler", "keep", False)
    for rank in ranks:
        assert rank.failure() is None and set(versions(rank)) == {"7"}
