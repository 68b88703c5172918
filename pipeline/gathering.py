"""Gathers start groups that a producer has played into shards, and says when a shard is due.

A trainer takes 9 to 14 ms to attach a shard, whatever its size, so many producers with small shards would keep it busy. A shard
holds consecutive start groups that were begun with one version. The rule is pure, and nothing here touches a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from records.rows import Decision, Ply

SHARD_ROWS = 500
"""Rows with which a shard is published, whether a step waits or not."""
SHARD_GROUPS = 1024
"""The same in start groups, for those that have few rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroups:
    """Consecutive start groups of a producer that were played and are not published."""

    first: int
    """Number of the first."""
    count: int
    version: int
    """Policy version with which they were begun; their rows have this version or newer ones."""
    decisions: Sequence[Decision]
    plies: Sequence[Ply]


def is_due(played: PlayedGroups, *, newest: int, gather: bool) -> bool:
    """Whether these start groups must be published now.

    They wait only while the run has start groups to spare, while their version is the newest, and until the shard is full.

    Args:
        newest: newest policy version of the run.
        gather: `Control.gather`, False while a step waits or the next one might.
    """
    full = len(played.decisions) >= SHARD_ROWS or played.count >= SHARD_GROUPS
    return full or not gather or played.version < newest


class Gathered:
    """The start groups that a producer has played and not published."""

    def __init__(self) -> None:
        self._waiting: list[PlayedGroups] = []  # in the order of their numbers; neighbours of one version are one entry

    @property
    def start_groups(self) -> int:
        """How many wait."""
        return sum(each.count for each in self._waiting)

    def add(self, played: PlayedGroups) -> None:
        """Take in what was played, in any order."""
        joined: list[PlayedGroups] = []
        for each in sorted([*self._waiting, played], key=lambda each: each.first):
            if joined and joined[-1].first + joined[-1].count == each.first and joined[-1].version == each.version:
                joined[-1] = _join(joined[-1], each)
            else:
                joined.append(each)
        self._waiting = joined

    def due(self, *, newest: int, gather: bool) -> list[PlayedGroups]:
        """The contents of the shards to publish now, in the order of their numbers; see `is_due`. They stay until `remove`."""
        return [each for each in self._waiting if is_due(each, newest=newest, gather=gather)]

    def remove(self, published: PlayedGroups) -> None:
        """Forget what was published."""
        self._waiting.remove(published)


def _join(left: PlayedGroups, right: PlayedGroups) -> PlayedGroups:
    return PlayedGroups(
        first=left.first,
        count=left.count + right.count,
        version=left.version,
        decisions=[*left.decisions, *right.decisions],
        plies=[*left.plies, *right.plies],
    )
