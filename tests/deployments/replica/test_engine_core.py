"""vLLM's own scheduler and request code around a version's change and a drain; only the model is missing."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from deployments.replica import engine_core
from deployments.vllm_versions import OLD
from tests.deployments.replica.bare_core import BLOCK, PROMPT, Core, config_of


@pytest.fixture(scope="module", autouse=True)
def utilities() -> None:
    engine_core.install()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return config_of(tmp_path_factory.mktemp("model"))


@pytest.fixture
def core(config: VllmConfig) -> Core:
    with set_current_vllm_config(config):
        return Core(config)


def hit(core: Core, request: Any) -> int:
    """Tokens that the prefix cache has for a request that has not begun."""
    tokens: int = core.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    return tokens


@pytest.mark.parametrize("recompute", [False, True])
def test_request_queued_before_a_commit_hits_no_older_prefix(core: Core, recompute: bool) -> None:
    core.add("runs")
    core.step()
    core.step()
    same = core.receive("same version")
    assert hit(core, same) == 3 * BLOCK, "the cache works"
    received = core.receive("received before")  # hashed in its thread, not in the busy loop yet
    core.add("second", [9] * 20)
    queued = core.add("queued")  # two run at most: it waits for its turn
    core.step()
    core.commit("8", recompute=recompute)
    core.core.add_request(received)
    for late in (received, queued, core.add("after")):
        assert late.cache_salt == "8/" and len(late.block_hashes) == 4
        assert hit(core, late) == 0, "keys and values of version 7"
    runs = core.scheduler.requests["runs"]
    assert (runs.num_computed_tokens > 0) is not recompute
    assert (runs.cache_salt == "7/") is not recompute


def test_mixed_blocks_are_hit_by_no_request_started_after_the_commit(core: Core) -> None:
    core.add("kept")
    core.step()
    core.commit("8", recompute=False)
    for _ in range(2 * BLOCK):  # fills blocks with keys and values of both versions
        core.step()
    kept_tokens = [*PROMPT, *[5] * BLOCK, 9]
    assert hit(core, core.receive("after", kept_tokens)) == 0
    core.add("new")
    core.step()
    core.step()
    assert hit(core, core.receive("like the new one")) == 3 * BLOCK


def test_request_in_its_prompt_is_recomputed_with_the_new_version(core: Core) -> None:
    """Its tokens will all be the new version's: none may be computed with keys and values of before."""
    prompt = core.add("prompt", [9] * 100)
    core.step()
    assert prompt.num_computed_tokens == 64 and not prompt.num_output_tokens, "two steps for the prompt"
    core.commit("8", recompute=False)
    assert prompt.num_computed_tokens == 0 and prompt.cache_salt == "8/" and hit(core, prompt) == 0


def test_routed_experts_of_a_request_are_kept_under_its_new_hashes(core: Core) -> None:
    """vLLM's connector cannot be told that a request's hashes change: it would end the engine."""
    scheduler: Any = core.scheduler
    of = () if OLD else (scheduler.kv_cache_manager,)
    scheduler.aux_output_connector = AuxOutputSchedulerConnector(*of)
    core.add("prompt", [9] * 100)
    core.scheduler.schedule()
    core.commit("8", recompute=False)
    metadata = core.scheduler.schedule().aux_output_connector_metadata
    assert metadata.requests.keys() == {"prompt"} and metadata.generation == 1
    assert not metadata.finished_requests
    sent = list(metadata.block_hashes["prompt"])  # 0.33: those of the tokens that are scheduled
    assert sent and sent == core.scheduler.requests["prompt"].block_hashes[: len(sent)]


def test_preempted_request_is_recomputed_with_the_new_version(core: Core) -> None:
    request = core.add("preempted")
    core.step()
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)
    core.commit("8", recompute=False)
    assert request.cache_salt == "8/" and hit(core, request) == 0


def test_continued_answer_may_be_in_the_prefix_cache(core: Core) -> None:
    """vLLM's scheduler asserts that a first prefill hits no more than the prompt."""
    core.add("same prompt and answer")
    while core.scheduler.requests:
        core.step()
    continued = core.add("continued", said=[5] * 20)
    core.step()
    assert continued.num_computed_tokens == len(continued.all_token_ids) - 1 == len(PROMPT) + 20
    assert core.scheduler.requests and list(continued.output_token_ids) == [5] * 21


def test_client_cache_salt_still_separates_prefixes(core: Core) -> None:
    core.add("a", salt="tenant/1")
    core.step()
    core.step()
    assert hit(core, core.receive("b", salt="tenant/1")) == 3 * BLOCK
    assert hit(core, core.receive("c", salt="tenant/2")) == hit(core, core.receive("d")) == 0
    other = core.receive("e", salt="tenant/1")
    core.commit("8", recompute=False)
    core.core.add_request(other)
    assert other.cache_salt == "8/tenant/1"


@pytest.mark.parametrize("recompute", [False, True])
def test_commit_drops_encoder_outputs(core: Core, recompute: bool) -> None:
    """A request in the middle of its image is computed again; one that has used its image up goes on."""
    manager = core.scheduler.encoder_cache_manager
    manager.cache_size = manager.num_free_slots = manager.num_freeable_slots = 100
    halfway, past = core.add("halfway", [9] * 20), core.add("past", [8] * 20)
    core.step()
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="cat", mm_position=PlaceholderRange(offset=0, length=4)
    )
    for request in (halfway, past):
        request.mm_features = [image]
    manager.allocate(halfway, 0)
    core.commit("8", recompute=recompute)
    assert "reset_encoder_cache" in core.core.model_executor.asked
    assert manager.cached == {} and manager.get_cached_input_ids(halfway) == set()
    assert halfway in core.scheduler.waiting and halfway.cache_salt == "8/"
    assert (past in core.scheduler.running) is not recompute


@pytest.mark.parametrize("a_step_ahead", [False, True])
@pytest.mark.parametrize("by_batch_size", [None, [(1, 1, 3), (2, 2, 1)]])
def test_drafting_stops_until_the_next_version(
    by_batch_size: list[tuple[int, int, int]] | None, a_step_ahead: bool, tmp_path: Path
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    drafts["num_speculative_tokens_per_batch_size"] = by_batch_size
    config = config_of(tmp_path, a_step_ahead=a_step_ahead, drafts=drafts)
    with set_current_vllm_config(config):
        core = Core(config)

    def step() -> tuple[int, int]:
        """How many tokens are drafted, and how many that were drafted before are verified."""
        output = core.step()
        return output.num_spec_tokens_to_schedule, len(output.scheduled_spec_decode_tokens.get("a", ()))

    core.add("a", [9] * 20)
    engine_core.stop_drafting(core.core, "6")
    assert [step(), step()] == [(3, 0), (3, 3)], "6 has been replaced by 7"
    for _ in range(2):  # a repeated call changes nothing
        engine_core.stop_drafting(core.core, "7")
    assert [step(), step(), step()] == [(0, 3), (0, 0), (0, 0)], "what was drafted is verified"
    core.commit("8", recompute=False)
    assert [step(), step()] == [(3, 0), (3, 3)]
    core.add("b", [9] * 20)
    step()
    assert step()[0] == (1 if by_batch_size else 3)


def test_drain_schedules_no_new_request_and_finishes_preempted_ones(core: Core) -> None:
    request = core.add("a")
    core.step()
    core.add("b", [9] * 20)
    assert engine_core.drain(core.core) == 1
    core.step()
    assert [each.request_id for each in core.scheduler.running] == ["a"]
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)
    assert engine_core.running(core.core) == 1, "it has begun, so it is to end before the swap"
    while engine_core.running(core.core):
        core.step()
    assert [each.request_id for each in core.scheduler.waiting] == ["b"]
    core.commit("8", recompute=True)
    core.step()
    assert [each.request_id for each in core.scheduler.running] == ["b"]


def test_cancelled_drain_restores_the_scheduler(core: Core) -> None:
    core.add("a")
    core.step()
    core.add("b", [9] * 20)
    engine_core.drain(core.core)
    engine_core.end_drain(core.core, paused=True)
    core.step()
    assert core.scheduler.requests["a"].num_output_tokens == 1
    engine_core.end_drain(core.core, paused=False)
    core.step()
    assert {each.request_id for each in core.scheduler.running} == {"a", "b"}
