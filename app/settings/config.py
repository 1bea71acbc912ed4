"""The configuration: everything under `args` in serve_config.yaml, with its defaults.

The sections are in modules of their own: `engine`, `weights`, `security`, and `trainers.settings` for the
section `trainer`. Rules between sections are in `rules`, and error messages are made in `errors`.

Importing this module imports nothing heavy (no torch, Ray, vLLM or transformers): a wrong setting is
reported in milliseconds, before anything starts.
"""

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
from app.settings.errors import ConfigError, explain
from app.settings.rules import broken_rules
from app.settings.section import Device, Placement, Section
from app.settings.security import AbsolutePath, SecurityConfig
from app.settings.weights import WeightsConfig
from deployments.ledger.adapters.catalog import AdapterLimits
from deployments.ledger.limits import SizeLimits
from deployments.trainer.spec import adapter_directory
from trainers.settings import TrainerConfig


class RouterConfig(Section):
    """The proxy in front of the replicas: how many requests it admits, and for how long they may wait."""

    num_replicas: PositiveInt = 1
    max_ongoing_requests: PositiveInt = 2048  # per router replica; beyond these: 503 with Retry-After
    request_timeout_s: PositiveFloat = 600.0  # of looking for a replica; the answer itself has no limit
    max_body_bytes: PositiveInt = 32 << 20
    max_sequences: PositiveInt = 16384  # of one request: its prompts times its 'n'; more are a 400
    # A session leaves its replica, and a prompt the one that has its beginning in the KV cache, when that has
    # so many times the mean load. 1000: they stay.
    load_factor: float = Field(default=1.25, gt=1)
    prefix_affinity: bool = True  # without a session: where the beginning of the prompt is in the KV cache


class StoreConfig(Section):
    """Where committed versions are stored, and how many."""

    path: Path = Path("store")  # relative to state_dir
    keep: PositiveInt = 3  # committed versions
    # A replica writes what an outside program published. Until then each replica retains it in host memory:
    # with staging 'device' this costs a copy of every tensor before the commit, beside decoding.
    outside_versions: bool = True


class AdaptersConfig(Section):
    """LoRA adapters, which a fleet serves with `engine.extra.enable_lora: true`."""

    keep: PositiveInt = 2  # versions of one name; `max_cpu_loras` of them stay in an engine's memory


class AppConfig(Section):
    """The argument of `app.main:build`."""

    model: str = Field(min_length=1)  # built-in name, directory, or Hugging Face id
    served_model_name: str | None = None  # None: the same as `model`
    trust_remote_code: bool = False  # run the code that a checkpoint brings with it, in engines and trainer
    device: Device = Device.CPU
    placement: Placement = Placement.SEPARATE
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    router: RouterConfig = RouterConfig()
    trainer: TrainerConfig | None = None  # None: an outside trainer publishes through the HTTP routes
    store: StoreConfig = StoreConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    security: SecurityConfig = SecurityConfig()
    state_dir: AbsolutePath = Field(default=Path(".slipstream"), validate_default=True)

    @property
    def public_model_name(self) -> str:
        """The name by which clients ask for the model."""
        return self.model if self.served_model_name is None else self.served_model_name

    @property
    def fleet_size(self) -> SizeLimits:
        """How many replicas there may be."""
        if self.placement is Placement.COLOCATED:
            reason = "the slots that replicas share with the trainer are reserved when the fleet starts"
            return self.engine.size.model_copy(update={"fixed": reason})
        return self.engine.size

    @property
    def adapter_limits(self) -> AdapterLimits:
        """What the fleet allows of adapters."""
        return AdapterLimits(
            keep=self.adapters.keep,
            base_model=self.public_model_name,
            refusal=None if self.engine.serves_adapters else "set 'engine.extra.enable_lora' to true",
        )

    @property
    def store_path(self) -> Path:
        """The store's directory, absolute."""
        return self.state_dir / self.store.path.expanduser()

    @property
    def checkpoint_roots(self) -> tuple[Path, ...]:
        """Below which a checkpoint directory may be published: the store's too, or nobody could go back."""
        return (self.store_path, *self.security.checkpoint_roots)

    @property
    def adapter_roots(self) -> tuple[Path, ...]:
        """Below which an adapter may be loaded: the trainer's own too, if it trains one."""
        trains = self.trainer is not None and self.trainer.published_adapter is not None
        own = (adapter_directory(self.store_path),) if trains else ()
        return (*own, *self.security.checkpoint_roots)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Serve validates the arguments itself and shows pydantic's text, so that text must be our sentences.
        try:
            return handler(data)
        except ValidationError as error:
            raise ValueError(explain(error, cls)) from None

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if broken := list(broken_rules(self)):
            raise ValueError("\n".join(broken))
        return self


def parse_config(data: Any) -> AppConfig:
    """Validate the settings under `args`.

    Raises:
        ConfigError: one sentence per wrong setting.
    """
    try:
        return AppConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, AppConfig)) from None
