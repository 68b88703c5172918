"""A policy version (number, hash of its weights, adapter folder), the trainer step that published it, and an adapter's files."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from entente.telemetry.errors import DataError
from entente.telemetry.read_file import open_regular

BASE_VERSION = 0
BASE_HASH = "base"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""File names of peft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """The weights after a number of trainer steps. Equality compares number and hash, not the folder: the same weights may be
    in several folders, or in none if received over the network."""

    version: int
    """Number of trainer steps; 0: the base model."""
    adapter_hash: str
    """32 hex digits over both adapter files; 'base' for the base model. Decision rows store it with the number."""
    adapter: Path | None = field(default=None, compare=False)
    """Adapter folder in peft's layout. None for the base model, or if only number and hash are known."""

    @property
    def folder(self) -> Path:
        if self.adapter is None:
            raise DataError(f"policy {self} has no adapter folder here: publish it with its folder")
        return self.adapter

    def __str__(self) -> str:
        return f"version {self.version} ({self.adapter_hash})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The step from which a run continues."""

    published: PolicyVersion
    """Has the step's number; before the first step, the base model."""
    metrics: dict[str, float]
    set_aside: tuple[str, ...] = ()
    """A sentence per damaged checkpoint that was skipped."""

    @property
    def step_done(self) -> int:
        return self.published.version


BASE = PolicyVersion(version=BASE_VERSION, adapter_hash=BASE_HASH)


def lora_scale(rank: int, alpha: float, *, root: bool) -> float:
    """peft's scaling of B @ A; `root` is its `use_rslora`."""
    return alpha / (math.sqrt(rank) if root else rank)


def combined_hash(digests: Iterable[str]) -> str:
    """Hash of an adapter, 32 hex digits, from the SHA-256 hex digests of ADAPTER_FILES in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def measure_adapter(folder: Path) -> tuple[dict[str, dict[str, int | str]], str]:
    """(size and SHA-256 of each adapter file by name, hash of the adapter); raises DataError for a missing or unreadable file."""
    files: dict[str, dict[str, int | str]] = {}
    digests = []
    for name in ADAPTER_FILES:
        try:
            with open_regular(folder / name) as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
                files[name] = {"bytes": file.tell(), "sha256": digests[-1]}
        except FileNotFoundError as error:
            raise DataError(f"{folder / name} is missing; an adapter is {' and '.join(ADAPTER_FILES)}.") from error
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read ({error.strerror}): check who may read it.") from error
    return files, combined_hash(digests)


def version_in(folder: Path, version: int) -> PolicyVersion:
    """The adapter in `folder` as policy version `version`. Raises as `measure_adapter`."""
    return PolicyVersion(version=version, adapter_hash=measure_adapter(folder)[1], adapter=folder)
