"""Which shards an index knows: live or retired, with or without facts in its tables, and the start groups that they cover."""

import json

from storage.ranges import Ranges
from storage.snapshots import CoveredShard


class KnownShards:
    """The shards of one index, by name.

    Attributes:
        live: those whose files are in `shards/`.
        retired: retired ones, of which facts or counts are kept.
        held: those of both whose facts are in the tables; the others are settled.
        loose: those of `live` that no part covers.
    """

    def __init__(self) -> None:
        self.live: dict[str, CoveredShard] = {}
        self.retired: dict[str, CoveredShard] = {}
        self.held: dict[str, CoveredShard] = {}
        self.loose: dict[str, CoveredShard] = {}
        self._groups: dict[str, Ranges] = {}
        self._seen: dict[str, Ranges] = {}

    def add(self, shard: CoveredShard, *, held: bool, retired: bool = False, loose: bool = False) -> None:
        """A shard that was not known."""
        groups = self._groups.setdefault(shard.producer, Ranges())
        for group in shard.start_groups:
            groups.add(group, group + 1)
        self._see(shard)
        (self.retired if retired else self.live)[shard.name] = shard
        if held:
            self.held[shard.name] = shard
        if loose:
            self.loose[shard.name] = shard

    def get(self, name: str) -> CoveredShard | None:
        """The shard of this name; None if it is not known."""
        return self.live.get(name) or self.retired.get(name)

    def is_settled(self, name: str) -> bool:
        """Whether it is known, and its facts are not in the tables."""
        return name not in self.held and self.get(name) is not None

    def repeated(self, shard: CoveredShard) -> int | None:
        """The first of its start groups that another shard has, or had before it was forgotten; None if there is none."""
        known = self._groups.get(shard.producer, Ranges())
        return min((group for group in shard.start_groups if group in known), default=None)

    def retire(self, shard: CoveredShard) -> None:
        """A known shard is retired."""
        self.live.pop(shard.name, None)
        self.loose.pop(shard.name, None)
        self.retired[shard.name] = shard
        if shard.name in self.held:
            self.held[shard.name] = shard

    def forget(self, name: str) -> None:
        """Forget a live shard, if it is known."""
        for known in (self.loose, self.held):
            known.pop(name, None)
        if (shard := self.live.pop(name, None)) is not None:
            self._seen.pop(shard.producer)
            for other in (*self.live.values(), *self.retired.values()):
                if other.producer == shard.producer:
                    self._see(other)

    def seen(self) -> str:
        """The start groups of all known shards, as JSON: producer -> [first, one after the last] of each range."""
        return json.dumps({name: self._seen[name].as_lists() for name in sorted(self._seen)}, separators=(",", ":"))

    def _see(self, shard: CoveredShard) -> None:
        self._seen.setdefault(shard.producer, Ranges()).add(shard.number, shard.next_start_group)
