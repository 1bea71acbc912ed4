"""The base class of all sections of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings that cannot change and has no unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
