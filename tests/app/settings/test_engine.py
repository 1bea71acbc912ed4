from app.settings.config import parse_config
from app.settings.engine import EngineConfig
from tests.app.settings.complaints import COLOCATED, complaint


def test_numbers_are_accepted_as_values_of_the_engines_variables() -> None:
    config = parse_config({"model": "m", "engine": {"env": {"VLLM_BATCH_INVARIANT": 1}}})
    assert config.engine.env == {"VLLM_BATCH_INVARIANT": "1"}


def test_variables_of_other_programs_are_refused() -> None:
    assert complaint(engine={"env": {"PATH": "/tmp"}}) == (
        "'engine.env': expected names like VLLM_*, NCCL_* or CUDA_*, got 'PATH'"
    )


def test_values_of_variables_are_strings() -> None:
    assert complaint(engine={"env": {"NCCL_DEBUG": ["x"]}}) == (
        "'engine.env.NCCL_DEBUG': expected a valid string, got ['x']"
    )


def test_the_number_of_replicas_is_fixed_unless_there_is_room_for_more() -> None:
    fixed = parse_config({"model": "m"}).fleet_size
    assert (fixed.least, fixed.most, fixed.wanted, fixed.fixed) == (
        2,
        2,
        2,
        "'engine.max_replicas' is not set",
    )
    size = parse_config({"model": "m", "engine": {"max_replicas": 4}}).fleet_size
    assert (size.least, size.most, size.wanted, size.fixed) == (1, 4, 2, None)


def test_the_load_decides_with_auto() -> None:
    config = parse_config({"model": "m", "engine": {"num_replicas": "auto", "max_replicas": 4}})
    assert (config.engine.first_replicas, config.fleet_size.wanted) == (1, None)


def test_colocated_replicas_have_fixed_slots() -> None:
    reason = parse_config({"model": "m", **COLOCATED}).fleet_size.fixed
    assert reason is not None and reason.startswith("the slots")


def test_the_ranks_of_a_replica_are_the_product_of_its_parallel_sizes() -> None:
    sizes = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4)
    assert sizes.world_size == 24
