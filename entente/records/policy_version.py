"""A policy version: its number, the hash of its weights and its adapter folder. This module reads no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entente.telemetry.errors import DataError

BASE_VERSION = 0
BASE_HASH = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """The weights after a number of trainer steps.

    Two versions are equal if number and hash are equal. The folder does not count: the same weights may be in several folders,
    and a version received over the network has none.
    """

    version: int
    """Number of trainer steps; 0: the base model."""
    adapter_hash: str
    """32 hex digits over both adapter files; 'base' for the base model. Decision rows store it beside the number."""
    adapter: Path | None = field(default=None, compare=False)
    """Adapter folder in peft's layout. None for the base model, and where only number and hash are known."""

    @property
    def folder(self) -> Path:
        """The adapter folder.

        Raises:
            DataError: the version has no known folder.
        """
        if self.adapter is None:
            raise DataError(f"policy {self} has no adapter folder here: publish it with its folder")
        return self.adapter

    def __str__(self) -> str:
        return f"version {self.version} ({self.adapter_hash})"

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a missing folder becomes the empty string."""
        return {"version": self.version, "adapter": str(self.adapter or ""), "adapter_hash": self.adapter_hash}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PolicyVersion":
        """The inverse of `to_json`.

        Raises:
            KeyError: a field is missing.
        """
        folder = fields["adapter"]
        return cls(version=fields["version"], adapter_hash=fields["adapter_hash"], adapter=Path(folder) if folder else None)


BASE = PolicyVersion(version=BASE_VERSION, adapter_hash=BASE_HASH)
"""The base model without an adapter."""
