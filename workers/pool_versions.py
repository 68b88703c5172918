"""The policy versions that a pool has published and not retired."""

from collections.abc import Collection
from dataclasses import dataclass, field

from records.policy_version import BASE, BASE_VERSION, PolicyVersion

REPUBLISHED = 8
"""Versions before the newest that are published again on a readmitted worker."""


@dataclass(slots=True)
class PublishedVersions:
    """Versions by number, the newest last; the base model needs no publishing."""

    _published: dict[int, PolicyVersion] = field(default_factory=dict)
    _oldest: int = BASE_VERSION
    _kept: frozenset[int] = frozenset()

    def __contains__(self, version: int) -> bool:
        return version in self._published

    @property
    def newest(self) -> PolicyVersion:
        """The version last published."""
        return next(reversed(self._published.values()), BASE)

    def add(self, policy: PolicyVersion) -> None:
        """Add `policy` as the newest version."""
        self._published.pop(policy.version, None)
        self._published[policy.version] = policy

    def retire(self, oldest: int, keep: Collection[int]) -> None:
        """Remove versions before `oldest`, except `keep` and the newest."""
        kept = {*keep, self.newest.version}
        self._oldest, self._kept = max(self._oldest, oldest), frozenset(keep)
        self._published = {version: found for version, found in self._published.items() if version >= oldest or version in kept}

    def is_gone(self, version: int) -> bool:
        """Whether the version was retired, or never published here."""
        if version == self.newest.version:
            return False
        retired = version < self._oldest and version not in self._kept
        return retired or (version != BASE_VERSION and version not in self._published)

    def last(self) -> list[PolicyVersion]:
        """Versions that a readmitted worker must serve, the newest last."""
        return list(self._published.values())[-1 - REPUBLISHED :]
