"""Finding files whose names carry growing numbers, without listing their folder again and again.

A folder of a long run holds many thousands of files. It is listed when it is met, then followed by name: a
shard names its successor, so the next file is one ``stat`` away. Producers finish out of order, and a task
may fail for good, so a few names ahead are tried too and the gaps are remembered; a listing at long
intervals, or when the track was lost to a corrupt file, catches whatever that misses.
Never: open a file, or say a number twice.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from storage.files import FILES

LOOKAHEAD = 64  # names tried beyond the next one: more than the tasks one producer has in flight
GAPS_KEPT = 256  # gaps looked at again at every visit; older ones are left to the listing
RELIST_SECONDS = 30.0  # how late a file may be seen that neither way finds


class NumberedFiles:
    """The numbers of one folder's files, each said once, lowest first as far as they are there."""

    def __init__(self, folder: Path, pattern: re.Pattern[str], name_of: Callable[[int], str]) -> None:
        self._folder = folder
        self._within = f"{folder}/"  # dozens of names are tried at every visit, and a path for each would cost more than asking
        self._pattern = pattern
        self._name_of = name_of
        self._next = 0
        self._gaps: set[int] = set()
        self._seen: set[int] = set()
        self._listed_at: float | None = None

    def arrivals(self) -> Iterator[tuple[int, Path]]:
        """Files not said before; the caller may call ``covers`` or ``lost_track`` between two of them."""
        if self._listed_at is None or time.monotonic() - self._listed_at >= RELIST_SECONDS:
            self._listed_at = time.monotonic()
            for number in self._listed():
                yield self._say(number)
        for number in sorted(self._gaps):
            if self._exists(number):
                yield self._say(number)
        while (ahead := next(filter(self._exists, range(self._next, self._next + LOOKAHEAD)), None)) is not None:
            yield self._say(ahead)

    def covers(self, first: int, after: int) -> None:
        """The file numbered ``first`` stands for all numbers before ``after``, which is the next name."""
        self._gaps.difference_update(range(first, after))
        self._next = max(self._next, after)

    def lost_track(self) -> None:
        """The last file could not say which name comes next, so the folder is listed at the next visit."""
        self._listed_at = None

    def put_back(self, number: int) -> None:
        """The file could not be taken in, so it counts as new at the next visit."""
        self._seen.discard(number)
        self.lost_track()

    def _say(self, number: int) -> tuple[int, Path]:
        self._seen.add(number)
        self._gaps.discard(number)
        if number >= self._next:
            self._gaps.update(range(max(self._next, number - GAPS_KEPT), number))
            self._gaps = set(sorted(self._gaps)[-GAPS_KEPT:])
            self._next = number + 1
        return number, self._folder / self._name_of(number)

    def _exists(self, number: int) -> bool:
        return number not in self._seen and FILES.exists(f"{self._within}{self._name_of(number)}")

    def _listed(self) -> list[int]:
        numbers = [int(match[1]) for name in FILES.names(self._folder) if (match := self._pattern.fullmatch(name))]
        return sorted(number for number in numbers if number not in self._seen)


def follow_folders(parent: Path, followed: dict[str, NumberedFiles], pattern: re.Pattern[str], layout: str) -> None:
    """Begin to follow the folders of ``parent`` that are new; there are a few, each with very many files."""
    for folder in FILES.folders(parent):
        if folder not in followed:
            followed[folder] = NumberedFiles(parent / folder, pattern, layout.format)
