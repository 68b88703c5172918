"""Which policy versions an engine serves: pure bookkeeping that every engine of several versions shares.

The newest is the one published last. A version is never served under two adapters, and a slot number is never used twice: vLLM
keys its prefix cache on an adapter's name and path, so each version has its own of both, and its own number.
"""

from collections.abc import Collection
from dataclasses import dataclass

from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from telemetry.errors import EngineError, VersionGoneError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVersion:
    """One policy version that an engine has loaded and draws from."""

    policy: PolicyVersion
    slot: int = 0
    """Number under which the engine knows it; 0: the weights that are loaded, base or merged."""


class ServedVersions:
    """The versions that one engine serves, from the base model on."""

    def __init__(self, engine: str, slots: int) -> None:
        """`slots`: adapters held at a time; 0: whatever comes replaces the weights, and is the only one."""
        self._engine, self._slots, self._last_slot = engine, slots, 0
        self.newest = LoadedVersion(policy=BASE)
        self._by_version = {BASE_VERSION: self.newest}

    def __iter__(self):
        return iter(self._by_version.values())

    def find(self, version: int | None) -> LoadedVersion:
        """The version asked for, or the newest.

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

    def holds(self, policy: PolicyVersion) -> bool:
        """Whether these weights are served under this number already."""
        found = self._by_version.get(policy.version)
        return found is not None and found.policy == policy

    def next_slot(self) -> int:
        """A slot number for one more adapter; 0 where weights are replaced.

        Raises:
            EngineError: all slots hold versions that nobody retired.
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
        """Serve this one from now on, as the newest; those that it replaces."""
        if self._slots:
            replaced = [self._by_version.pop(served.policy.version)] if served.policy.version in self._by_version else []
        else:
            replaced, self._by_version = list(self._by_version.values()), {}
        self._by_version[served.policy.version] = self.newest = served
        return replaced

    def touch(self, version: int) -> None:
        """Make a version that is served the newest."""
        self.newest = self._by_version[version]

    def retire(self, oldest: int, keep: Collection[int]) -> list[LoadedVersion]:
        """Take out what is before `oldest`, but for those in `keep` and the newest; what was taken out."""
        gone = [
            served
            for served in self
            if served.policy.version < oldest and served.policy.version not in keep and served is not self.newest
        ]
        for served in gone:
            del self._by_version[served.policy.version]
        return gone
