"""The policy versions that a vLLM engine serves.

The newest is the one published last. A version has one adapter, and a slot number is never reused: vLLM keys its prefix cache on
an adapter's name and path, so each version needs its own.
"""

from collections.abc import Collection
from dataclasses import dataclass

from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from telemetry.errors import EngineError, VersionGoneError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """A policy version that an engine has loaded."""

    policy: PolicyVersion
    slot: int = 0
    """vLLM's number of the adapter; 0: the loaded weights, base or merged."""


class ServedVersions:
    """The versions that one engine serves; at first the base model."""

    def __init__(self, engine: str, slots: int) -> None:
        """`slots`: adapters held at a time; 0: each version replaces the weights, so one is served at a time."""
        self._engine, self._slots, self._last_slot = engine, slots, 0
        self.newest = LoadedVersion(policy=BASE)
        self._by_version = {BASE_VERSION: self.newest}

    def __iter__(self):
        return iter(self._by_version.values())

    def find(self, version: int | None) -> LoadedVersion:
        """The version `version`, or the newest for None.

        Raises:
            VersionGoneError: it is not served.
        """
        found = self.newest if version is None else self._by_version.get(version)
        if found is None:
            raise VersionGoneError(
                f"engine '{self._engine}' does not serve policy version {version}: "
                f"ask for {self.newest.policy.version}, the newest"
            )
        return found

    def serves(self, policy: PolicyVersion) -> bool:
        """Whether this version is served with these weights."""
        found = self._by_version.get(policy.version)
        return found is not None and found.policy == policy

    def next_slot(self) -> int:
        """A slot number for a new adapter; 0 if weights are replaced.

        Raises:
            EngineError: all slots hold versions that are not retired.
        """
        if not self._slots:
            return 0
        held = sorted(served.policy.version for served in self if served.slot)
        if len(held) >= self._slots:
            raise EngineError(
                f"all {self._slots} adapter slots of engine '{self._engine}' are taken by versions "
                f"{', '.join(map(str, held))}: retire old ones, or raise inference.adapter_slots"
            )
        self._last_slot += 1
        return self._last_slot

    def add(self, served: LoadedVersion) -> list[LoadedVersion]:
        """Serve this version as the newest; returns the versions that it replaces."""
        if self._slots:
            replaced = [self._by_version.pop(served.policy.version)] if served.policy.version in self._by_version else []
        else:
            replaced, self._by_version = list(self._by_version.values()), {}
        self._by_version[served.policy.version] = self.newest = served
        return replaced

    def make_newest(self, version: int) -> None:
        """Make a served version the newest."""
        self.newest = self._by_version[version]

    def retire(self, oldest: int, keep: Collection[int]) -> list[LoadedVersion]:
        """Remove versions before `oldest`, except those in `keep` and the newest; returns the removed versions."""
        gone = [
            served
            for served in self
            if served.policy.version < oldest and served.policy.version not in keep and served is not self.newest
        ]
        for served in gone:
            del self._by_version[served.policy.version]
        return gone
