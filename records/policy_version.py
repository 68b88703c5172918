"""A policy version: its number, its weights and where they lie.

It is built where a version is published or read, and passed on whole. Nothing here reads a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telemetry.errors import DataError

BASE_VERSION = 0
BASE_HASH = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Weights under the number of the trainer step that made them.

    Two are equal if number and hash are equal: the same weights may lie in several folders, and whoever answers over the network
    does not name one.
    """

    version: int
    """Trainer steps in these weights; 0: the base model."""
    adapter_hash: str
    """32 hex digits over both adapter files; 'base' for the base model. Decision rows carry it beside the number."""
    adapter: Path | None = field(default=None, compare=False)
    """Folder of the adapter, in peft's layout. None for the base model, and where only number and hash are known."""

    @property
    def folder(self) -> Path:
        """Folder of the adapter.

        Raises:
            DataError: it has none, or none is known here.
        """
        if self.adapter is None:
            raise DataError(f"policy {self} has no adapter folder here: publish it with its folder")
        return self.adapter

    def __str__(self) -> str:
        return f"version {self.version} ({self.adapter_hash})"

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; no folder is the empty string."""
        return {"version": self.version, "adapter": str(self.adapter or ""), "adapter_hash": self.adapter_hash}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PolicyVersion":
        """What `to_json` wrote.

        Raises:
            KeyError: a field is missing.
        """
        folder = fields["adapter"]
        return cls(version=fields["version"], adapter_hash=fields["adapter_hash"], adapter=Path(folder) if folder else None)


BASE = PolicyVersion(version=BASE_VERSION, adapter_hash=BASE_HASH)
"""The base model without an adapter."""
