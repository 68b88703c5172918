"""Finds new files whose names are growing numbers, without listing their folder each time.

The folder of a long run holds many thousands of files. It is listed once; after that, each shard names its successor, so the
next file costs one `stat`. Producers finish out of order and a task may fail for good, so some further names are tried and gaps
are remembered. The folder is listed again every RELIST_SECONDS, or after a damaged file. Each number is returned once. No file
is opened.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from storage.files import existing_names, folders_in, names_in

LOOKAHEAD = 64  # names tried after the next one; a producer has fewer tasks in flight
GAPS_KEPT = 256  # gaps checked at every visit; older ones are found by the listing
RELIST_SECONDS = 30.0  # delay after which any other file is found


class NumberedFiles:
    """The numbers of one folder's files, each returned once, lowest first as far as they exist."""

    def __init__(self, folder: Path, pattern: re.Pattern[str], name_of: Callable[[int], str]) -> None:
        self._folder = folder
        self._pattern = pattern
        self._name_of = name_of
        self._next = 0
        self._gaps: set[int] = set()
        self._seen: set[int] = set()
        self._listed_at: float | None = None

    def new_files(self) -> Iterator[tuple[int, Path]]:
        """Files not returned before. The caller may call `skip_covered` or `list_again` between two of them."""
        if self._listed_at is None or time.monotonic() - self._listed_at >= RELIST_SECONDS:
            self._listed_at = time.monotonic()
            for number in self._listed():
                yield self._return_once(number)
        tried = sorted(self._gaps)
        while found := self._there([*tried, *range(self._next, self._next + LOOKAHEAD)]):
            yield from map(self._return_once, found)
            tried = []

    def skip_covered(self, first: int, after: int) -> None:
        """The file `first` covers all numbers before `after`, which is the next name."""
        self._gaps.difference_update(range(first, after))
        self._next = max(self._next, after)

    def pass_over(self, numbers: Iterable[int]) -> None:
        """Never return these files, because what they say is known."""
        self._seen.update(numbers)
        self._next = max(self._next, max(self._seen, default=-1) + 1)

    def list_again(self) -> None:
        """List the folder at the next visit, because the last file did not say which name is next."""
        self._listed_at = None

    def retry(self, number: int) -> None:
        """Return this file again at the next visit, because it could not be read."""
        self._seen.discard(number)
        self.list_again()

    def _return_once(self, number: int) -> tuple[int, Path]:
        self._seen.add(number)
        self._gaps.discard(number)
        if number >= self._next:
            self._gaps.update(range(max(self._next, number - GAPS_KEPT), number))
            self._gaps = set(sorted(self._gaps)[-GAPS_KEPT:])
            self._next = number + 1
        return number, self._folder / self._name_of(number)

    def _there(self, numbers: Sequence[int]) -> list[int]:
        """Those of these numbers that have a file and were not returned, in their order."""
        names = {number: self._name_of(number) for number in numbers if number not in self._seen}
        there = existing_names(self._folder, names.values())
        return [number for number, name in names.items() if name in there]

    def _listed(self) -> list[int]:
        numbers = [int(match[1]) for name in names_in(self._folder) if (match := self._pattern.fullmatch(name))]
        return sorted(number for number in numbers if number not in self._seen)


def follow_folders(parent: Path, followed: dict[str, NumberedFiles], pattern: re.Pattern[str], layout: str) -> None:
    """Add the new folders of `parent` to `followed`. There are few folders, each with very many files."""
    for folder in folders_in(parent):
        if folder not in followed:
            followed[folder] = NumberedFiles(parent / folder, pattern, layout.format)
