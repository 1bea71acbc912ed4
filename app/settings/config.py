"""Settings under `args` in serve_config.yaml, and rules between sections. Larger sections have their own
modules."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from app.settings.engine import EngineConfig
from app.settings.section import ConfigError, Device, Placement, Section, expected, explain
from app.settings.security import AbsolutePath, SecurityConfig
from app.settings.weights import StagingMode, WeightsConfig, Wire, quoted
from deployments.protocol.adapters import MAX_NAME, is_name
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig, SizeLimits
from deployments.protocol.rollouts import RolloutLimits
from deployments.trainer.spec import adapter_directory
from deployments.weights.transports.registry import TRANSPORTS, SameGpu, Transport
from trainers.settings import TrainerConfig


class RouterConfig(Section):
    """The routers, through which every request comes."""

    num_replicas: PositiveInt = 1
    """Router processes."""
    max_ongoing_requests: PositiveInt = 2048
    """Requests of one router process at once; above that: 503 with Retry-After."""
    request_timeout_s: PositiveFloat = 600.0
    """How long a request looks for a replica. An answer may take as long as it takes."""
    max_body_bytes: PositiveInt = 32 << 20
    """The size of a request's body; above that: 413."""


class StoreConfig(Section):
    """Committed versions on disk."""

    path: Path = Path("store")
    """The directory, relative to `state_dir`."""
    shared: bool = True
    """All hosts see `path` as one directory. `false`: each has its own there, to which one of its replicas
    writes each version; a replica that starts where one is missing takes it from another replica. Each
    replica keeps what arrives in host memory until it is written."""
    keep: PositiveInt = 3
    """How many committed versions stay."""
    outside_versions: bool = True
    """A replica writes what an external trainer published. Until then each replica keeps it in host memory:
    with staging `device` this costs a copy of every tensor before the commit, beside decoding."""


class AdaptersConfig(Section):
    """LoRA adapters; they need `engine.extra.enable_lora: true`."""

    keep: PositiveInt = 2
    """Live versions of one name. `max_cpu_loras` of them stay in an engine's memory."""


class AppConfig(Section):
    """Argument of `app.main:build`: what is under `args` in a configuration file."""

    model: str = Field(min_length=1)
    """A built-in model's name (`smollm2-135m`), a directory, or a Hugging Face id."""
    served_model_name: str | None = None
    """The name that requests use. None: the same as `model`."""
    trust_remote_code: bool = False
    """Run a checkpoint's own code, in engines and trainer."""
    device: Device = Device.CPU
    """`cpu` or `cuda`, of engines and trainer."""
    placement: Placement = Placement.SEPARATE
    """`separate`: the trainer has its own devices. `colocated`: one trainer rank on every GPU of the
    replicas."""
    engine: EngineConfig = EngineConfig()
    """The replicas."""
    weights: WeightsConfig = WeightsConfig()
    """How an update is transferred, staged and committed."""
    router: RouterConfig = RouterConfig()
    """The routers."""
    trainer: TrainerConfig | None = None
    """The trainer. None: an external trainer publishes through the HTTP routes."""
    store: StoreConfig = StoreConfig()
    """Committed versions on disk."""
    adapters: AdaptersConfig = AdaptersConfig()
    """LoRA adapters."""
    rollouts: RolloutLimits | None = None
    """Capture of rollouts. None: requests with `x-rollout-id` are refused."""
    security: SecurityConfig = SecurityConfig()
    """Tokens, and directories that may be published."""
    state_dir: AbsolutePath = Field(default=Path(".slipstream"), validate_default=True)
    """Where the journal and, unless `store.path` is absolute, the store are."""

    @property
    def public_model_name(self) -> str:
        return self.model if self.served_model_name is None else self.served_model_name

    @property
    def ledger(self) -> LedgerConfig:
        return self.weights.ledger(
            shared_store=self.store.shared, outside_versions=self.store.outside_versions
        )

    @property
    def fleet_size(self) -> SizeLimits:
        if self.placement is Placement.COLOCATED:
            return self.engine.size.model_copy(update={"fixed": _RESERVED_SLOTS})
        return self.engine.size

    @property
    def adapter_limits(self) -> AdapterLimits:
        return AdapterLimits(
            keep=self.adapters.keep,
            base_model=self.public_model_name,
            refusal=None if self.engine.serves_adapters else "set 'engine.extra.enable_lora' to true",
        )

    @property
    def store_path(self) -> Path:
        return self.state_dir / self.store.path.expanduser()

    @property
    def checkpoint_roots(self) -> tuple[Path, ...]:
        """Checkpoints below these may be published; includes the store, for rollbacks."""
        return (self.store_path, *self.security.directories)

    @property
    def adapter_roots(self) -> tuple[Path, ...]:
        """Adapters below these may be loaded; includes the trainer's own."""
        trains = self.trainer is not None and self.trainer.published_adapter is not None
        own = (adapter_directory(self.store_path),) if trains else ()
        return (*own, *self.security.directories)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Serve validates the arguments too, and shows the text of this error.
        try:
            return handler(data)
        except ValidationError as error:
            raise ValueError(explain(error, cls)) from None

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if broken := list(_broken_rules(self)):
            raise ValueError("\n".join(broken))
        return self


def parse_config(data: Any) -> AppConfig:
    """Raises ConfigError: one sentence per wrong setting."""
    try:
        return AppConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, AppConfig)) from None


# -- rules between sections, one sentence for each that is broken ----------------------------------
# Those within `trainer` are in `trainers.settings`, which works without this application.

_RESERVED_SLOTS = "the slots that replicas share with the trainer are reserved when the fleet starts"

# Engine arguments with settings of their own.
RESERVED_ENGINE_ARGS = {
    "model": "model",
    "tokenizer": "model",
    "served_model_name": "served_model_name",
    "trust_remote_code": "trust_remote_code",
    "weight_transfer_config": "weights.transport",
    "data_parallel_rank": "engine.data_parallel_size",
}

LOGPROBS_MODE = "processed_logprobs"  # the sampled distribution's

# Others assert in vLLM's first model runner that they draft as many tokens as configured.
PAUSABLE_DRAFTERS = ["ngram", "eagle", "eagle3", "mtp", "draft_model"]
DRAFTS_BY_BATCH = "num_speculative_tokens_per_batch_size"

# vLLM's defaults.
VLLM_MAX_LORA_RANK, VLLM_MAX_LORAS = 16, 1

# Set by other settings, or by placement.
RESERVED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "placement",
    "VLLM_API_KEY": "security.user_token_file",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "engine.extra.enable_lora",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "security.checkpoint_roots",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "security.checkpoint_roots",
}


def _broken_rules(config: AppConfig) -> Iterator[str]:
    yield from _device_rules(config)
    yield from _count_rules(config)
    yield from _size_rules(config)
    yield from _gpu_share_rules(config)
    yield from _trainer_rules(config)
    yield from _drafter_rules(config)
    yield from _draft_acceptance_rules(config)
    yield from _lora_rules(config)
    yield from _extra_rules(config)
    if not config.store.shared:
        yield from _own_store_rules(config)
    mode = config.engine.extra.get("logprobs_mode", LOGPROBS_MODE)
    if config.rollouts is not None and mode != LOGPROBS_MODE:
        reason = "a trainer needs those of the distribution that was sampled from"
        yield expected("engine.extra.logprobs_mode", f"{LOGPROBS_MODE!r} with 'rollouts'", repr(mode), reason)


def _names(accept: Callable[[Transport], bool]) -> str:
    return quoted([name for name, transport in TRANSPORTS.items() if accept(transport)])


def _device_rules(config: AppConfig) -> Iterator[str]:
    device, weights = config.device.value, config.weights
    transport = weights.transport_record
    if transport.device != device:
        wanted = f"{_names(lambda other: other.device == device)} with device {device!r}"
        reason = f"{transport.name!r} connects processes on device {transport.device!r}"
        yield expected("weights.transport", wanted, repr(transport.name), reason)
    if weights.staging is StagingMode.NONE and not transport.native:
        reason = f"'none' selects vLLM's own engines, which are {_names(lambda other: other.native)}"
        yield expected("weights.staging", f"'host' with transport {transport.name!r}", "'none'", reason)
    if weights.keep_published and (transport.name, weights.staging) != ("nccl", StagingMode.DEVICE):
        reason = "workers restore the last version from their shadows"
        wanted = "null without transport 'nccl' and staging 'device'"
        yield expected("weights.keep_published", wanted, repr(weights.keep_published.value), reason)
    if weights.wire is Wire.VLLM:
        yield from _wire_rules(config)
    if weights.staging is StagingMode.DEVICE and config.engine.serves_adapters:
        reason = "LoRA wraps the modules that a shadow would copy"
        yield expected("weights.staging", "'host' with 'engine.extra.enable_lora'", "'device'", reason)
    if config.device is Device.CPU:
        yield from _cpu_rules(config)


def _wire_rules(config: AppConfig) -> Iterator[str]:
    weights = config.weights
    if not weights.transport_record.native:
        reason = f"vLLM's own trainer engines are {_names(lambda other: other.native)}"
        transport = weights.transport_record.name
        yield expected("weights.wire", f"'slipstream' with transport {transport!r}", "'vllm'", reason)
        return
    if weights.staging not in (StagingMode.DEVICE, StagingMode.NONE):
        reason = "with a GPU to receive on, a version is staged there"
        yield expected("weights.staging", "'device' or 'none' with wire 'vllm'", "'host'", reason)
    if config.trainer is not None:
        reason = "the trainer deployment states digests, which vLLM's wire cannot carry"
        yield expected("weights.wire", "'slipstream' with a trainer", "'vllm'", reason)


def _cpu_rules(config: AppConfig) -> Iterator[str]:
    if config.placement is Placement.COLOCATED:
        yield expected("placement", "'separate' with device 'cpu'", "'colocated'", "there is no GPU to share")
    if config.trainer is not None and config.trainer.packed:
        reason = "FlexAttention has no backward pass there"
        yield expected("trainer.packed", "false with device 'cpu'", "true", reason)
    if config.engine.extra.get("enable_sleep_mode"):
        reason = "sleep releases GPU memory"
        yield expected("engine.extra.enable_sleep_mode", "false with device 'cpu'", "true", reason)


def _count_rules(config: AppConfig) -> Iterator[str]:
    replicas = config.engine.first_replicas
    setting = "min_replicas" if config.engine.num_replicas is None else "num_replicas"
    for name in ("min_replicas", "max_unavailable"):
        count = getattr(config.weights, name)
        if count > replicas:
            reason = f"'engine.{setting}' is {replicas}"
            yield expected(f"weights.{name}", f"at most {replicas}", count, reason)
    if config.engine.extra.get("enable_expert_parallel") and config.engine.world_size == 1:
        reason = "experts are distributed over the ranks of one replica"
        wanted = "more than one rank in a replica, or false"
        yield expected("engine.extra.enable_expert_parallel", wanted, "true with 1 rank", reason)


def _size_rules(config: AppConfig) -> Iterator[str]:
    engine = config.engine
    count, least, most = engine.num_replicas, engine.min_replicas, engine.max_replicas
    if config.placement is Placement.COLOCATED:
        if count is None:
            wanted = "a number with placement 'colocated'"
            yield expected("engine.num_replicas", wanted, "'auto'", _RESERVED_SLOTS)
        if most is not None:
            yield expected("engine.max_replicas", "none with placement 'colocated'", most, _RESERVED_SLOTS)
        return
    if most is None:
        if count is None:
            reason = "each replica needs its GPUs or cores"
            yield expected("engine.max_replicas", "a number with num_replicas 'auto'", "none", reason)
        return
    if not least <= most:
        reason = f"'engine.max_replicas' is {most}"
        yield expected("engine.min_replicas", f"at most {most}", least, reason)
    elif count is not None and not least <= count <= most:
        reason = "'engine.min_replicas' and 'engine.max_replicas'"
        yield expected("engine.num_replicas", f"{least} to {most}", count, reason)
    if engine.extra.get("disable_log_stats"):
        reason = "the load is known from vLLM's statistics"
        yield expected("engine.extra.disable_log_stats", "false with 'engine.max_replicas'", "true", reason)


def _gpu_share_rules(config: AppConfig) -> Iterator[str]:
    if config.device is Device.CPU:
        return
    shares = {"engine.gpus_per_rank": config.engine.gpus_per_rank}
    if config.trainer is not None:
        shares["trainer.gpus_per_rank"] = config.trainer.gpus_per_rank
    if config.placement is Placement.SEPARATE:
        yield from _whole_gpu_rules(config, shares)
        return
    total = sum(shares.values())
    if config.trainer is not None and total > 1:
        parts = " + ".join(f"{share:g}" for share in shares.values())
        reason = "an engine rank and a trainer rank share each GPU when colocated"
        yield expected(
            "engine.gpus_per_rank + trainer.gpus_per_rank", "at most 1", f"{parts} = {total:g}", reason
        )


def _whole_gpu_rules(config: AppConfig, shares: Mapping[str, float]) -> Iterator[str]:
    """Ranks of a group need different GPUs: Ray ensures it only for whole GPUs and slots."""
    ranks = {"engine.gpus_per_rank": config.engine.world_size}
    if config.trainer is not None:
        ranks["trainer.gpus_per_rank"] = config.trainer.world_size
    for name, count in ranks.items():
        if count > 1 and shares[name] < 1:
            reason = f"{count} ranks need a GPU each, and Ray could place fractions on the same one"
            yield expected(name, "1 with placement 'separate'", f"{shares[name]:g}", reason)


def _trainer_rules(config: AppConfig) -> Iterator[str]:
    is_colocated = config.placement is Placement.COLOCATED
    transport, engine, trainer = config.weights.transport_record, config.engine, config.trainer
    if trainer is None:
        if is_colocated:
            reason = "without a trainer nothing shares the GPUs"
            yield expected("trainer", "a trainer with placement 'colocated'", "none", reason)
        return
    if not is_colocated:
        if transport.same_gpu is SameGpu.POSSIBLE and config.weights.staging is StagingMode.NONE:
            wanted = f"'colocated' with vLLM's own {transport.name!r} engine and a trainer"
            reason = "it connects only processes on the same GPU"
            yield expected("placement", wanted, "'separate'", reason)
        return
    if transport.same_gpu is SameGpu.IMPOSSIBLE:
        names = _names(lambda other: other.same_gpu is SameGpu.POSSIBLE)
        reason = f"{transport.name!r} does not connect two processes on the same GPU"
        wanted = f"{names} with placement 'colocated'"
        yield expected("weights.transport", wanted, repr(transport.name), reason)
    gpus = engine.first_replicas * engine.world_size
    if trainer.world_size != gpus:
        replicas = "1 replica" if engine.first_replicas == 1 else f"{engine.first_replicas} replicas"
        reason = f"one trainer rank on every GPU of the replicas: {replicas} of {engine.world_size}"
        yield expected("trainer.world_size", f"{gpus} with placement 'colocated'", trainer.world_size, reason)


def _drafter_rules(config: AppConfig) -> Iterator[str]:
    drafter = None if config.trainer is None else config.trainer.drafter
    if drafter is None:
        return
    drafts = config.engine.extra.get("speculative_config")
    drafts = drafts if isinstance(drafts, Mapping) else {}
    model, method = drafts.get("model"), drafts.get("method")
    if drafter.model is None and method != "mtp":
        wanted = "'mtp' with 'trainer.drafter' without a 'model'"
        yield expected("engine.extra.speculative_config.method", wanted, repr(method) if method else "none")
    elif drafter.model is not None and model != drafter.model:
        wanted = f"'trainer.drafter.model', {drafter.model!r}"
        reason = "engines draft with the head that is trained"
        yield expected(
            "engine.extra.speculative_config.model", wanted, repr(model) if model else "none", reason
        )


def _draft_acceptance_rules(config: AppConfig) -> Iterator[str]:
    engine = config.engine
    if not engine.min_draft_acceptance:
        return
    drafts, beside = engine.extra.get("speculative_config"), "with 'engine.min_draft_acceptance'"
    method = drafts.get("method") if isinstance(drafts, Mapping) else None
    if method not in PAUSABLE_DRAFTERS:
        reason = "with others vLLM can do no step without drafts"
        wanted = f"{quoted(PAUSABLE_DRAFTERS)} {beside}"
        yield expected(
            "engine.extra.speculative_config.method", wanted, repr(method) if method else "none", reason
        )
    if engine.data_parallel_size > 1:
        reason = "its ranks must draft the same number of tokens in each step"
        yield expected("engine.data_parallel_size", f"1 {beside}", engine.data_parallel_size, reason)
    if engine.extra.get("disable_log_stats"):
        reason = "acceptance is known from vLLM's statistics"
        yield expected("engine.extra.disable_log_stats", f"false {beside}", "true", reason)
    table = drafts.get(DRAFTS_BY_BATCH) if isinstance(drafts, Mapping) else None
    if config.device is Device.CUDA and not (engine.enforce_eager or _has_zero(table)):
        reason = "vLLM captures no CUDA graphs of steps without drafts otherwise, which are slower then"
        wanted = f"ranges of which one has 0 drafts {beside}, such as [[1, 255, 3], [256, 256, 0]]"
        yield expected(f"engine.extra.speculative_config.{DRAFTS_BY_BATCH}", wanted, table or "none", reason)


def _has_zero(table: object) -> bool:
    """vLLM checks the rest."""
    return isinstance(table, list) and any(isinstance(each, list) and each[-1:] == [0] for each in table)


def _own_store_rules(config: AppConfig) -> Iterator[str]:
    """What replicas do not take from each other."""
    drafts = config.engine.extra.get("speculative_config")
    if config.engine.serves_adapters:
        yield expected("store.shared", "true with 'engine.extra.enable_lora'", "false", "adapters are there")
    if isinstance(drafts, Mapping) and drafts.get("model") is not None:
        reason = "a version without a new drafter has that of the version before"
        yield expected("store.shared", "true with a drafter that has a checkpoint", "false", reason)
    if config.weights.staging is StagingMode.NONE:
        yield expected("store.shared", "true with 'weights.staging: none'", "false", "replicas keep nothing")
    if config.security.urls:
        reason = "the router downloads what every replica reads"
        yield expected("store.shared", "true with a URL in 'security.checkpoint_roots'", "false", reason)


def _lora_rules(config: AppConfig) -> Iterator[str]:
    lora = None if config.trainer is None else config.trainer.published_adapter
    if lora is None:
        return
    if not is_name(lora.name) or lora.name == config.public_model_name:
        wanted = f"1 to {MAX_NAME} printable characters, not the model's own name"
        yield expected("trainer.lora.name", wanted, repr(lora.name))
    if not config.engine.serves_adapters:
        reason = "replicas must be able to serve what the trainer publishes"
        yield expected("engine.extra.enable_lora", "true with 'trainer.lora'", "false", reason)
        return
    most = config.engine.extra.get("max_lora_rank", VLLM_MAX_LORA_RANK)
    if isinstance(most, int) and lora.rank > most:
        wanted = f"at most 'engine.extra.max_lora_rank', {most}"
        yield expected("trainer.lora.rank", wanted, lora.rank, "a replica has capacity for no more")
    slots = config.engine.extra.get("max_loras", VLLM_MAX_LORAS)
    if isinstance(slots, int) and slots < 2:
        reason = "requests of one version of the adapter end while those of the next begin"
        yield expected("engine.extra.max_loras", "at least 2 with 'trainer.lora'", slots, reason)


def _extra_rules(config: AppConfig) -> Iterator[str]:
    if config.engine.extra.get("ec_transfer_config") is not None:
        reason = "an update cannot drop encoder outputs that are cached outside the engine"
        yield expected("engine.extra.ec_transfer_config", "none", "one", reason)
    own = {name: f"engine.{name}" for name in type(config.engine).model_fields} | RESERVED_ENGINE_ARGS
    for name in config.engine.extra:
        if name in own:
            yield f"'engine.extra.{name}': set '{own[name]}' instead (every setting has one name)"
    for name in config.engine.env:
        if name in RESERVED_VARIABLES:
            owner = RESERVED_VARIABLES[name]
            yield f"'engine.env.{name}': set '{owner}' instead (every setting has one name)"
