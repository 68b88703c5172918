"""Settled shards: every row is too old for any step to come. A trainer's index keeps counts of them in place of facts.

What a selection says about them follows from their advantage groups alone: whether one could be trained on, whether its returns
differed, and how many steps used it. Groups that are equal in this are one entry with their number. So the counts of a selection
are those over the facts of the whole run, for every number of uses.

`index/settled-000003.json` is such a record. With it a new index reads neither the facts of settled shards nor the ledgers that
name nothing else. It counts only for the same returns, and if exactly the shards that it was made from are still there. Else it
is made again from the parts. A record is published once; deleting it costs time only.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from storage.files import names_in, publish_once
from storage.json_files import is_sealed, read_object, sealed
from storage.ranges import Ranges
from storage.snapshots import CoveredShard
from telemetry.errors import DataError

Fate = tuple[bool, bool, int]
"""What counts of an advantage group: usable, has spread (both as in `select_batch.sql`), and how many steps used it."""
_NAME = re.compile(r"settled-(\d{6,})\.json")
_LAYOUT = 2
_KEPT = 2  # the newest, and one in case it is damaged
_MODULUS = 1 << 128
NO_VERSION = -(1 << 31)
"""Lower than what any query reaches."""


@dataclass(slots=True, kw_only=True)
class Settled:
    """Counts over settled shards."""

    below: int = NO_VERSION
    """Every row of a settled shard is of an older version; NO_VERSION: nothing is settled."""
    shards: dict[str, Ranges] = field(default_factory=dict)
    """Producer -> start groups that the names of settled shards cover."""
    marks: int = 0
    """Sum of a hash of each settled shard's name, size and write time."""
    ledgers: Ranges = field(default_factory=Ranges)
    """Steps whose uses are counted."""
    still_open: set[int] = field(default_factory=set)
    """Steps of those ledgers that also name other shards, so that they must be read again."""
    fates: Counter[Fate] = field(default_factory=Counter)
    """Advantage groups by fate."""
    decisions: int = 0
    orders_rejected: int = 0
    max_policy_lag: int = 0
    """Maximum over their rows in ledgers."""
    newest_step: int = 0
    """Newest step of a ledger that names one of them."""

    def add(self, shards: Iterable[CoveredShard], below: int) -> None:
        """Count these shards as settled, whose fates were added."""
        self.below = max(self.below, below)
        for shard in shards:
            self.shards.setdefault(shard.producer, Ranges()).add(shard.number, shard.next_start_group)
            self.marks = (self.marks + _mark(shard)) % _MODULUS

    def members(self, known: Iterable[CoveredShard]) -> list[CoveredShard] | None:
        """The settled shards among the known ones; None if they are not exactly those that were counted."""
        members = [shard for shard in known if shard.number in self.shards.get(shard.producer, ())]
        return members if sum(map(_mark, members)) % _MODULUS == self.marks else None

    def standings(self, max_uses: int) -> Counter[str]:
        """Settled advantage groups by standing (`select_batch.sql`), for a trainer whose step reaches none of them.

        Returns:
            counts of `used`, `unusable`, `expired`, and `expired_with_spread`, which is a part of `expired`.
        """
        found: Counter[str] = Counter()
        for (usable, has_spread, uses), groups in self.fates.items():
            if uses >= max_uses:
                found["used"] += groups
            elif not usable:
                found["unusable"] += groups
            else:
                found["expired"] += groups
                found["expired_with_spread"] += groups if has_spread else 0
        return found


def write_settled(folder: Path, settled: Settled, rule: str) -> None:
    """Publish a record under the next number, and remove old ones.

    Args:
        rule: names the rule of the returns, which the fates depend on.
    """
    final = folder / f"settled-{max(_numbers(folder), default=0) + 1:06d}.json"
    record = {
        "layout": _LAYOUT,
        "name": final.name,
        "rule": rule,
        "below": settled.below,
        "shards": {producer: ranges.as_lists() for producer, ranges in settled.shards.items()},
        "marks": settled.marks,
        "ledgers": settled.ledgers.as_lists(),
        "still_open": sorted(settled.still_open),
        "fates": [[*fate, groups] for fate, groups in settled.fates.items()],
        "decisions": settled.decisions,
        "orders_rejected": settled.orders_rejected,
        "max_policy_lag": settled.max_policy_lag,
        "newest_step": settled.newest_step,
    }
    publish_once(final, lambda aside: aside.write_text(sealed(record)))
    for number in sorted(_numbers(folder))[:-_KEPT]:
        (folder / f"settled-{number:06d}.json").unlink(missing_ok=True)


def read_settled(folder: Path, rule: str, below: int) -> Settled | None:
    """The newest intact record for this rule that settles nothing from version `below` on; None if there is none."""
    for number in sorted(_numbers(folder), reverse=True):
        path = folder / f"settled-{number:06d}.json"
        try:
            record = read_object(path)
            usable = is_sealed(record) and (record["layout"], record["name"], record["rule"]) == (_LAYOUT, path.name, rule)
        except (DataError, FileNotFoundError, KeyError):
            continue  # it only saves time
        if usable and record["below"] <= below:
            return _settled_of(record)
    return None


def _settled_of(record: dict[str, Any]) -> Settled:
    return Settled(
        below=record["below"],
        shards={producer: Ranges(ranges) for producer, ranges in record["shards"].items()},
        marks=record["marks"],
        ledgers=Ranges(record["ledgers"]),
        still_open=set(record["still_open"]),
        fates=Counter({(usable, spread, uses): groups for usable, spread, uses, groups in record["fates"]}),
        decisions=record["decisions"],
        orders_rejected=record["orders_rejected"],
        max_policy_lag=record["max_policy_lag"],
        newest_step=record["newest_step"],
    )


def _mark(shard: CoveredShard) -> int:
    text = f"{shard.name} {shard.size} {shard.written_ns}"
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest())


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in names_in(folder) if (match := _NAME.fullmatch(name))]
