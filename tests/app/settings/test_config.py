import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from app.command.serve_file import read_serve_file
from app.settings.config import (
    AppConfig,
    LossConfig,
    OptimizerConfig,
    WeightsConfig,
    parse_config,
)
from app.settings.engine_args import check_names
from app.settings.errors import ConfigError
from deployments.ledger.limits import LedgerConfig
from deployments.protocol import CommitMode

CONFIGS = Path("app/layouts")
COLOCATED: dict[str, Any] = {
    "device": "cuda",
    "placement": "colocated",
    "engine": {"num_replicas": 2, "gpus_per_rank": 0.6},
    "weights": {"transport": "ipc", "staging": "device"},
    "trainer": {"strategy": "fsdp2", "world_size": 2, "gpus_per_rank": 0.4},
}
SEPARATE: dict[str, Any] = {
    "device": "cuda",
    "weights": {"transport": "nccl", "staging": "device"},
    "trainer": {},
}


def complaint(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "m", **settings})
    return str(caught.value)


def test_only_the_model_is_required() -> None:
    config = parse_config({"model": "m"})
    assert config.public_model_name == "m"
    assert config.trainer is None
    assert config.state_dir.is_absolute()
    assert config.store_path == config.state_dir / "store"


def test_the_chunks_are_as_large_as_suits_the_transport() -> None:
    assert parse_config({"model": "m"}).weights.sent_chunk_bytes == 64 << 20
    assert parse_config({"model": "m", **SEPARATE}).weights.sent_chunk_bytes == 512 << 20
    chosen = {**SEPARATE["weights"], "chunk_bytes": 1 << 20}
    assert parse_config({"model": "m", **SEPARATE, "weights": chosen}).weights.sent_chunk_bytes == 1 << 20


def test_the_default_file_is_valid() -> None:
    document = yaml.safe_load(Path("serve_config.yaml").read_text())
    config = parse_config(document["applications"][0]["args"])
    assert config.engine.num_replicas == 2
    assert config.engine.dtype == "float32"
    assert config.trainer is not None


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_ready_made_configuration_is_valid(file: Path) -> None:
    ready = read_serve_file(file)
    assert ready.config.device == "cuda"
    command = f"serve run app/layouts/{file.name}"
    assert command in file.read_text(), "it says how to start it"


def test_the_ready_made_configurations_are_there() -> None:
    names = {file.stem for file in CONFIGS.glob("*.yaml")}
    assert names == {
        "async_inflight",
        "http_ipc",
        "http_nccl",
        "ipc",
        "ipc_fsdp_dense",
        "ipc_fsdp_ep",
        "nccl_tp",
        "nccl_two_replicas",
    }


def test_numbers_are_fine_as_values_of_the_engines_variables() -> None:
    config = parse_config({"model": "m", "engine": {"env": {"VLLM_BATCH_INVARIANT": 1}}})
    assert config.engine.env == {"VLLM_BATCH_INVARIANT": "1"}


def test_colocated_gpus_are_accepted() -> None:
    assert parse_config({"model": "m", **COLOCATED}).weights.transport == "ipc"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": {"num_replica": 2}},
            "unknown setting 'engine.num_replica' (did you mean 'num_replicas'?)",
        ),
        (
            {"num_replicas": 2},
            "unknown setting 'num_replicas' (did you mean 'engine.num_replicas' or 'router.num_replicas'?)",
        ),
        (
            {"security": {"zzz": 2}},
            "unknown setting 'security.zzz' (expected one of host, token_file)",
        ),
        (
            {"engine": {"num_replicas": 0}},
            "'engine.num_replicas': expected greater than 0, but 0 came",
        ),
        (
            {"weights": {"commit": "one"}},
            "'weights.commit': expected 'together' or 'rolling', but 'one' came",
        ),
        (
            {"store": 3},
            "'store': expected a section with settings of its own (path, keep, outside_versions), but 3 came",
        ),
        ({"model": ""}, "'model': expected a string with at least 1 character, but '' came"),
        (
            {"weights": {"transport": "nccl"}},
            "'weights.transport': expected 'shm' or 'gloo' with device 'cpu', but 'nccl' came "
            "(CUDA IPC and NCCL need GPUs: device 'cuda')",
        ),
        (
            {"weights": {"staging": "device"}},
            "'weights.staging': expected 'host' with device 'cpu', but 'device' came "
            "(a shadow of the parameters needs a GPU: device 'cuda')",
        ),
        (
            {"weights": {"staging": "none"}},
            "'weights.staging': expected 'host' with transport 'shm', but 'none' came "
            "('none' means vLLM's own engines, which are 'ipc' and 'nccl')",
        ),
        (
            {"device": "cuda"},
            "'weights.transport': expected 'ipc' or 'nccl' with device 'cuda', but 'shm' came "
            "('shm' and 'gloo' connect CPU engines)",
        ),
        (
            {"weights": {"min_replicas": 3}},
            "'weights.min_replicas': expected at most 2, but 3 came ('engine.num_replicas' is 2)",
        ),
        (
            {"weights": {"max_unavailable": 3}},
            "'weights.max_unavailable': expected at most 2, but 3 came ('engine.num_replicas' is 2)",
        ),
        (
            {"engine": {"extra": {"dtype": "x"}}},
            "'engine.extra.dtype': set 'engine.dtype' instead (one place for each setting)",
        ),
        (
            {"trainer": {"world_size": 2}},
            "'trainer.world_size': expected 1 with strategy 'single', but 2 came "
            "(more than one rank needs strategy 'fsdp2')",
        ),
        (
            {"trainer": {"optimizer": {"schedule": "cosine"}}},
            "'trainer.optimizer.total_steps': expected a number with schedule 'cosine', but none came "
            "(it says where to end)",
        ),
        (
            COLOCATED | {"engine": {"gpus_per_rank": 0.7}},
            "'engine.gpus_per_rank + trainer.gpus_per_rank': expected at most 1, but 0.7 + 0.4 = 1.1 came "
            "(an engine rank and a trainer rank share each GPU when colocated)",
        ),
        (
            COLOCATED | {"engine": {"num_replicas": 3, "gpus_per_rank": 0.5}},
            "'trainer.world_size': expected 3 with placement 'colocated', but 2 came "
            "(one trainer rank on every GPU of the replicas: 3 replicas of 1)",
        ),
        (
            COLOCATED | {"engine": {"num_replicas": 1, "data_parallel_size": 4, "gpus_per_rank": 0.5}},
            "'trainer.world_size': expected 4 with placement 'colocated', but 2 came "
            "(one trainer rank on every GPU of the replicas: 1 replica of 4)",
        ),
        (
            COLOCATED | {"weights": {"transport": "nccl", "staging": "device"}},
            "'weights.transport': expected 'ipc' with placement 'colocated', but 'nccl' came "
            "(NCCL does not connect two processes on one GPU)",
        ),
        (
            SEPARATE | {"engine": {"gpus_per_rank": 1.5}},
            "'engine.gpus_per_rank': expected at most 1, but 1.5 came (a rank runs on one GPU)",
        ),
        (
            SEPARATE | {"engine": {"tensor_parallel_size": 2, "gpus_per_rank": 0.5}},
            "'engine.gpus_per_rank': expected 1 with placement 'separate', but 0.5 came "
            "(2 ranks need a GPU each, and fractions could put them on one)",
        ),
        (
            SEPARATE | {"trainer": {"strategy": "fsdp2", "world_size": 4, "gpus_per_rank": 0.25}},
            "'trainer.gpus_per_rank': expected 1 with placement 'separate', but 0.25 came "
            "(4 ranks need a GPU each, and fractions could put them on one)",
        ),
        (
            {"engine": {"env": {"PATH": "/tmp"}}},
            "'engine.env': expected names as VLLM_*, NCCL_* or CUDA_*, but 'PATH' came",
        ),
        (
            {"engine": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}},
            "'engine.env.CUDA_VISIBLE_DEVICES': set 'placement' instead (one place for each setting)",
        ),
        (
            {"engine": {"env": {"NCCL_DEBUG": ["x"]}}},
            "'engine.env.NCCL_DEBUG': expected a valid string, but ['x'] came",
        ),
        (
            COLOCATED | {"placement": "separate", "trainer": {}},
            "'placement': expected 'colocated' with transport 'ipc' and a trainer, but 'separate' came "
            "(CUDA IPC reaches only processes on the same GPU)",
        ),
        (
            COLOCATED | {"trainer": None},
            "'trainer': expected a trainer with placement 'colocated', but none came "
            "(nothing shares the GPUs without one)",
        ),
        (
            {"engine": {"enable_expert_parallel": True}},
            "'engine.enable_expert_parallel': expected more than one rank in a replica, or false, "
            "but true with 1 rank came (experts are spread over the ranks of one replica)",
        ),
    ],
)
def test_a_wrong_setting_gets_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    assert complaint(**settings) == sentence


def test_every_wrong_setting_is_named_at_once() -> None:
    lines = complaint(engine={"num_replicas": 0}, weights={"transport": "tcp"}, modle="x").splitlines()
    assert [line.split("'")[1] for line in lines] == ["engine.num_replicas", "weights.transport", "modle"]


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^missing setting 'model'"):
        parse_config({})


def test_pydantics_own_error_carries_the_sentence() -> None:
    # Serve validates the arguments itself, and shows this text.
    with pytest.raises(ValidationError, match=r"unknown setting 'engine.num_replica' \(did you mean"):
        AppConfig.model_validate({"model": "m", "engine": {"num_replica": 2}})


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse_config({"model": "m"}).engine.num_replicas = 3  # type: ignore[misc]


def test_the_ledger_gets_its_part() -> None:
    ledger = WeightsConfig(commit=CommitMode.ROLLING, lease_s=90).ledger()
    assert type(ledger) is LedgerConfig
    assert (ledger.commit, ledger.lease_s) == (CommitMode.ROLLING, 90)


def test_engine_arguments_that_vllm_does_not_know_are_refused() -> None:
    check_names({"block_size": 16}, ["block_size"])
    with pytest.raises(ConfigError, match=r"'engine.extra.blok_size' \(did you mean 'block_size'\?\)"):
        check_names({"blok_size": 16}, ["block_size"])


def test_importing_the_configuration_and_the_launcher_imports_nothing_heavy() -> None:
    program = (
        "import sys, app.settings.config, app.command.launch, app.command.cli, app.command.submit\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_mirrored_settings_are_those_of_the_trainers() -> None:
    from trainers import losses, optimizer

    for mirror, original in ((LossConfig, losses.LossConfig), (OptimizerConfig, optimizer.OptimizerConfig)):
        assert _defaults(mirror) == {field.name: field.default for field in dataclasses.fields(original)}


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    return {name: field.default for name, field in section.model_fields.items()}
