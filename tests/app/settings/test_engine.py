from app.settings.config import parse_config
from app.settings.engine import EngineConfig
from tests.app.settings.complaints import complaint


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


def test_the_ranks_of_a_replica_are_the_product_of_its_parallel_sizes() -> None:
    sizes = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4)
    assert sizes.world_size == 24
