"""The manifest of a stored version: what `manifest.json` in its directory says.

A newer Slipstream may have written it: unknown fields are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a stored version."""

    dtype: str  # torch's name, without "torch."
    shape: tuple[int, ...]
    digest: str  # 16 hexadecimal digits, see `digest_definition`


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """What a stored version is and what it consists of."""

    version: int
    label: str | None = None
    fleet_id: str | None = None
    digest: str | None = None  # of all tensors (`version_digest`), with which the fleet committed it
    trainer_step: int | None = None  # optimizer steps that made it; None if its publisher did not state them
    tensors: Mapping[str, StoredTensor]  # by checkpoint name

    def encode(self) -> str:
        """The manifest as JSON text; fields without a value are left out."""
        known: dict[str, Any] = _ADAPTER.dump_python(self, mode="json", exclude_none=True)
        return json.dumps(known, indent=1)

    @classmethod
    def decode(cls, text: str | bytes) -> "VersionManifest":
        """The inverse of `encode`.

        Raises:
            ValueError: no manifest; names the first field that is wrong.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "text"
            raise ValueError(
                f"not a manifest: {field}: {first['msg']}, got {first['input']!r:.80}"
            ) from error


_ADAPTER = TypeAdapter(VersionManifest)
