"""Where the engines stage a version."""

from app.settings.config import AppConfig
from app.settings.devices import Device
from app.settings.weights import StagingMode

# The engine looks whether 'device' is possible on its CPU, and says why if it takes 'host'.
AUTOMATIC = "automatic"


def staging(config: AppConfig) -> str:
    """The configured staging, or the one for this device."""
    if config.weights.staging is not None:
        return config.weights.staging.value
    if config.device is Device.CPU and not config.engine.serves_adapters:
        return AUTOMATIC
    return StagingMode.HOST.value
