"""Every setting of the application, with its default: what stands under `args` in serve_config.yaml.

Importing this module imports nothing heavy (no torch, Ray, vLLM or transformers): a wrong setting is
reported in milliseconds, before anything starts. Rules between settings are in `config_rules`, the
sentences of the complaints in `config_errors`.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)

from app.settings.errors import ConfigError, explain
from app.settings.rules import broken_rules
from deployments.ledger.limits import LedgerConfig

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Fraction = Annotated[float, Field(gt=0, le=1)]
EngineVariable = Annotated[str, AfterValidator(lambda name: _engine_variable(name))]
EnvironmentValue = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _engine_variable(name: str) -> str:
    if re.fullmatch(r"(VLLM|NCCL|CUDA)_[A-Z0-9_]+", name) is None:
        raise ValueError(f"'engine.env': expected names as VLLM_*, NCCL_* or CUDA_*, but {name!r} came")
    return name


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    SEPARATE = "separate"  # the trainer has devices of its own
    COLOCATED = "colocated"  # one trainer rank on every GPU of the replicas


class TransportName(StrEnum):
    SHM = "shm"
    GLOO = "gloo"
    IPC = "ipc"
    NCCL = "nccl"


# On a GPU a chunk costs a turn of the trainer's on the device that decodes, so there are few.
CHUNK_BYTES = {
    TransportName.SHM: 64 << 20,
    TransportName.GLOO: 64 << 20,
    TransportName.IPC: 1 << 30,
    TransportName.NCCL: 512 << 20,
}
# Rests cost few tokens more in all, and decoding slows by less than a tenth (benchmarks/RESULTS.md).
STAGING_SHARES = {
    TransportName.SHM: 1.0,
    TransportName.GLOO: 1.0,
    TransportName.IPC: 0.1,
    TransportName.NCCL: 0.25,
}


class StagingPlace(StrEnum):
    HOST = "host"  # received tensors wait in host memory, and are loaded inside the pause
    DEVICE = "device"  # a shadow of the parameters is filled while generating: the pause is one copy
    NONE = "none"  # vLLM's own engines, inside the pause: least memory, longest pause


class Strategy(StrEnum):
    SINGLE = "single"
    FSDP2 = "fsdp2"


class EngineConfig(Section):
    """The rollout replicas: one vLLM engine each."""

    num_replicas: PositiveInt = 2
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: PositiveInt | None = None  # None: the model's own
    max_num_seqs: PositiveInt = 256
    seed: int = 0
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: Fraction = 0.9
    cpu_kv_cache_gib: PositiveInt = 1
    enforce_eager: bool = False
    load_format: str = "auto"
    quantization: str | None = None
    enable_sleep_mode: bool = False
    gpus_per_rank: PositiveFloat = 1.0  # a fraction when a trainer rank shares the GPU
    num_cpus: NonNegativeFloat = (
        0.0  # reserved per replica; more than there are makes requests hang in silence
    )
    start_timeout_s: PositiveFloat = 600.0
    drain_timeout_s: PositiveFloat = 10.0
    extra: dict[str, Any] = Field(default_factory=dict)  # further AsyncEngineArgs of vLLM, by their names
    # Of the engines' processes: VLLM_*, NCCL_* and CUDA_*, as VLLM_BATCH_INVARIANT: 1.
    env: dict[EngineVariable, EnvironmentValue] = Field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class WeightsConfig(LedgerConfig):
    """How an update travels, and the ledger's rules for it (deadlines, lease, how it commits)."""

    transport: TransportName = TransportName.SHM
    staging: StagingPlace = StagingPlace.HOST
    # A trainer rank has two chunks on its GPU (ipc, nccl). None: what suits the transport.
    chunk_bytes: int | None = Field(default=None, ge=1 << 16, le=4 << 30)
    # Of a GPU's time, while requests run: staging rests between chunks, so that tokens keep their pace and an
    # update takes longer; 1: as fast as it goes. None: what suits the transport. An idle replica never rests.
    staging_share: float | None = Field(default=None, gt=0.0, le=1.0)
    # IPC handles can only come pickled. Even then they are read by a restricted unpickler.
    allow_pickled_ipc_over_http: bool = False

    @property
    def sent_chunk_bytes(self) -> int:
        return CHUNK_BYTES[self.transport] if self.chunk_bytes is None else self.chunk_bytes

    @property
    def chosen_staging_share(self) -> float:
        return STAGING_SHARES[self.transport] if self.staging_share is None else self.staging_share

    def ledger(self) -> LedgerConfig:
        return LedgerConfig(**{name: getattr(self, name) for name in LedgerConfig.model_fields})


class RouterConfig(Section):
    num_replicas: PositiveInt = 1
    max_ongoing_requests: PositiveInt = 1024  # per router replica
    max_queued_requests: NonNegativeInt = 1024  # beyond those: 503 with Retry-After
    retry_after_s: PositiveFloat = 1.0
    request_timeout_s: PositiveFloat = 600.0
    max_body_bytes: PositiveInt = 32 << 20


class OptimizerConfig(Section):
    """AdamW. Mirrors trainers.optimizer.OptimizerConfig, which lives beside torch (a test compares them)."""

    learning_rate: PositiveFloat = 1e-6
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None  # where a decaying schedule ends
    final_fraction: float = Field(default=0.0, ge=0, le=1)


class LossConfig(Section):
    """GRPO. Mirrors trainers.losses.LossConfig, which lives beside torch (a test compares them)."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    importance_cap: PositiveFloat = 2.0  # truncated importance sampling on rollout log-probabilities
    kl_coefficient: NonNegativeFloat = 0.0
    aggregation: Literal["token", "sequence", "constant"] = "token"
    max_tokens: PositiveInt = 1024


class TrainerConfig(Section):
    strategy: Strategy = Strategy.SINGLE
    world_size: PositiveInt = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Published and stored weights are cast to it (on the device); None: they stay as they are.
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    max_grad_norm: PositiveFloat = 1.0
    max_tokens_per_microbatch: PositiveInt = 8192
    seed: int = 0
    gpus_per_rank: PositiveFloat = 1.0
    cpu_threads: NonNegativeInt = 0  # 0: torch decides
    start_timeout_s: PositiveFloat = 600.0
    step_timeout_s: PositiveFloat = 600.0


class StoreConfig(Section):
    path: Path = Path("store")  # relative to state_dir
    keep: PositiveInt = 3  # committed versions
    # What an outside program published is written by a replica. Until then each replica keeps it in host
    # memory: with staging 'device' that costs a copy of every tensor, before the commit and beside decoding.
    outside_versions: bool = True


class SecurityConfig(Section):
    host: str = "127.0.0.1"  # the same as http_options.host
    token_file: AbsolutePath | None = None  # else the environment's SLIPSTREAM_TOKEN

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self, environment: Mapping[str, str] = os.environ) -> SecretStr | None:
        """The bearer token of control and train routes; None: they are open, which only loopback may be.

        Raises:
            ConfigError: no token on an address that others can reach, or a token file without one.
        """
        token = environment.get("SLIPSTREAM_TOKEN", "").strip()
        if self.token_file is not None:
            try:
                token = self.token_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                came = f"{self.token_file} came ({error.strerror})"
                raise ConfigError(f"'security.token_file': expected a readable file, but {came}") from error
            if not token:
                raise ConfigError(f"'security.token_file': expected a token, but {self.token_file} is empty")
        if token:
            return SecretStr(token)
        if self.is_loopback:
            return None
        raise ConfigError(
            f"'security.host' is {self.host!r}, which others can reach: expected a token in SLIPSTREAM_TOKEN "
            "or in the file 'security.token_file', but there is none"
        )


class AppConfig(Section):
    """The argument of `app.main:build`."""

    model: str = Field(min_length=1)  # built-in name, directory, or Hugging Face id
    served_model_name: str | None = None  # None: as `model`
    device: Device = Device.CPU
    placement: Placement = Placement.SEPARATE
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    router: RouterConfig = RouterConfig()
    trainer: TrainerConfig | None = None  # None: an outside trainer publishes through the HTTP routes
    store: StoreConfig = StoreConfig()
    security: SecurityConfig = SecurityConfig()
    state_dir: AbsolutePath = Field(default=Path(".slipstream"), validate_default=True)

    @property
    def public_model_name(self) -> str:
        return self.model if self.served_model_name is None else self.served_model_name

    @property
    def store_path(self) -> Path:
        return self.state_dir / self.store.path.expanduser()

    @model_validator(mode="wrap")
    @classmethod
    def _complain_in_sentences(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Serve validates the arguments itself and shows pydantic's text: so the sentences must be in it.
        try:
            return handler(data)
        except ValidationError as error:
            raise ValueError(explain(error, cls)) from None

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        if broken := list(broken_rules(self)):
            raise ValueError("\n".join(broken))
        return self


def parse_config(data: Any) -> AppConfig:
    """Validate what stands under `args`.

    Raises:
        ConfigError: one sentence per wrong setting, the first one first.
    """
    try:
        return AppConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, AppConfig)) from None
