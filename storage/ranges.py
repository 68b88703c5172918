"""Whole numbers as disjoint ranges: start groups, shards and steps mostly follow one another, so a long run has few ranges."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


class Ranges:
    """A set of whole numbers that only grows."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """`ranges`: [first, one after the last] of each, as `as_lists` returns them."""
        self._firsts: list[int] = []
        self._afters: list[int] = []
        for first, after in ranges:
            self.add(first, after)

    def add(self, first: int, after: int) -> None:
        """Add the numbers from `first` on that are smaller than `after`."""
        if first >= after:
            return
        low, high = bisect_left(self._afters, first), bisect_right(self._firsts, after)
        if low < high:  # these touch the new range, or overlap it
            first, after = min(first, self._firsts[low]), max(after, self._afters[high - 1])
        self._firsts[low:high], self._afters[low:high] = [first], [after]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number < self._afters[place]

    def as_lists(self) -> list[list[int]]:
        """[first, one after the last] of each range, in ascending order; no two touch."""
        return [list(pair) for pair in zip(self._firsts, self._afters, strict=True)]
