"""Which policy versions a pool has published and not retired: pure bookkeeping, no worker is known here."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from records.policy_version import BASE_HASH, BASE_VERSION

Served = tuple[int, str]
"""A policy version and its adapter's hash."""
BASE: Served = (BASE_VERSION, BASE_HASH)
REPUBLISHED = 8
"""Versions before the newest that a worker gets again when it comes back."""


@dataclass(slots=True)
class PublishedVersions:
    """Versions with their adapters, the newest last; the base model needs no publishing."""

    _adapters: dict[int, tuple[Path, str]] = field(default_factory=dict)
    _oldest: int = BASE_VERSION
    _kept: frozenset[int] = frozenset()

    def __contains__(self, version: int) -> bool:
        return version in self._adapters

    @property
    def newest(self) -> Served:
        """The version last published."""
        for version, (_, adapter_hash) in reversed(self._adapters.items()):
            return version, adapter_hash
        return BASE

    def add(self, version: int, adapter: Path, adapter_hash: str) -> None:
        """`version` is the newest from now on."""
        self._adapters.pop(version, None)
        self._adapters[version] = (adapter, adapter_hash)

    def retire(self, oldest: int, keep: Collection[int]) -> None:
        """Forget versions before `oldest`, but for `keep` and the newest."""
        kept = {*keep, self.newest[0]}
        self._oldest, self._kept = max(self._oldest, oldest), frozenset(keep)
        self._adapters = {version: found for version, found in self._adapters.items() if version >= oldest or version in kept}

    def is_gone(self, version: int) -> bool:
        """Was it retired, or never published here?"""
        if version == self.newest[0]:
            return False
        retired = version < self._oldest and version not in self._kept
        return retired or (version != BASE_VERSION and version not in self._adapters)

    def last(self) -> list[tuple[int, Path, str]]:
        """What a worker that comes back must serve again: version, adapter and hash, the newest last."""
        return [(version, *found) for version, found in list(self._adapters.items())[-1 - REPUBLISHED :]]
