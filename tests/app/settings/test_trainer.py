from app.settings.config import parse_config
from app.settings.trainer import trainer_spec
from deployments.trainer.spec import TrainerSpec
from tests.app.settings.complaints import SEPARATE


def test_a_trainers_spec_comes_from_all_sections() -> None:
    store = {"path": "v", "keep": 5}
    config = parse_config(
        {"model": "m", **SEPARATE, "state_dir": "/s", "store": store, "trust_remote_code": True}
    )
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "/models/m") == TrainerSpec(
        config=config.trainer,
        model="/models/m",
        device="cuda",
        store_dir="/s/v",
        transport="nccl",
        chunk_bytes=512 << 20,
        native=False,
        trust_remote_code=True,
    )


def test_without_staging_the_trainer_sends_with_vllms_own_engine() -> None:
    weights = {"transport": "nccl", "staging": "none", "chunk_bytes": 1 << 20}
    config = parse_config({"model": "m", **SEPARATE, "weights": weights})
    assert config.trainer is not None
    spec = trainer_spec(config, config.trainer, "/models/m")
    assert (spec.native, spec.chunk_bytes) == (True, 1 << 20)


def test_the_trainer_begins_with_the_revision_that_the_replicas_load() -> None:
    config = parse_config({"model": "org/m", **SEPARATE, "engine": {"extra": {"revision": "v2"}}})
    assert config.trainer is not None
    assert trainer_spec(config, config.trainer, "org/m").revision == "v2"
