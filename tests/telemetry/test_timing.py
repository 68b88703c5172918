"""A second counts once, however many spans cover it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entente.telemetry import timing
from entente.telemetry.timing import Spans

END = 60
"""Grid points at the far end of a drawn span; a point is a second."""


class Clock:
    """A clock that stands where it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of `entente.telemetry.timing`, set by hand."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def record(clock: Clock, drawn: list[tuple[str, int, int]]) -> Spans:
    """Spans as blocks would have left them: each opened at its start and closed at its end, in any order of closing."""
    spans = Spans()
    for name, start, end in drawn:
        clock.now = float(start)
        with spans.span(name):
            clock.now = float(end)
    return spans


def sampled(drawn: list[tuple[str, int, int]], since: int, until: int, name: str, but: Sequence[str] = ()) -> int:
    """Whole seconds of [since, until) whose midpoint lies in a span called `name`, and in none of `but`, looked at one by one."""
    open_at = [{known for known, a, b in drawn if a < x + 0.5 < b} for x in range(since, until)]
    return sum(name in names and not names & set(but) for names in open_at)


some_spans = st.lists(
    st.tuples(st.sampled_from(["rollout", "train", "publish"]), st.integers(0, END), st.integers(0, END)).map(
        lambda drawn: (drawn[0], *sorted(drawn[1:]))
    ),
    max_size=12,
)
window = st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted)


@given(drawn=some_spans, window=window)
def test_seconds_agree_with_looking_at_every_second(drawn: list[tuple[str, int, int]], window: list[int]):
    since, until = window
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(timing, "time", clock)
        spans = record(clock, drawn)
    for name in ("rollout", "train", "never"):
        assert spans.seconds(name, since, until) == sampled(drawn, since, until, name)
    assert spans.alone("train", since, until) == sampled(drawn, since, until, "train", but=("rollout", "publish"))
    assert spans.alone("rollout", since, until, or_with="publish") == sampled(drawn, since, until, "rollout", but=("train",))


def test_forgetting_leaves_every_span_that_reaches_past_the_mark(clock: Clock):
    spans = record(clock, [("train", 0, 4), ("train", 3, 6), ("train", 8, 9)])
    spans.forget(before=5)
    assert spans.seconds("train", 5, 20) == 2
    assert spans.seconds("train", 0, 3) == 0, "what ended before the mark is gone"


def test_what_has_not_ended_counts_and_is_not_forgotten(clock: Clock):
    spans = Spans()
    with spans.span("rollout"):
        clock.now = 10.0
        assert spans.seconds("rollout", 4, 10) == 6
        spans.forget(before=10)
        clock.now = 12.0
    assert spans.seconds("rollout", 10, 15) == 2
