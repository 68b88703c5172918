"""A run's page while the run trains: what its files say now, and parts that are drawn in a thread, one after another.

A request never waits for a plot: it gets each part as it was last drawn. Beside a run that trains on this machine the thread
rests `_REST` times as long as it worked, so an open page takes at most a few percent of a core, however long the run is."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from entente.reports.page import PARTS, Surroundings
from entente.reports.run_facts import FactsReader, RunFacts
from entente.reports.write_page import part
from entente.telemetry.errors import EntenteError, one_line
from storage.files import file_marks, is_held, names_in
from storage.runs import RunPaths

_AT_ONCE = ("head", "now")
"""Parts without plots, which are as new as the request."""
_REST, _LONGEST_REST_S = 25, 10.0
_SHARDS = 20
"""Read at a time, before the next part is drawn."""
_TICK_S = 10.0
"""Of ages in words, such as that of the last file."""
_LOOKED_AT_S = 20.0
"""A page that is open asks every few seconds; for one that is closed nothing is drawn."""


def run_mark(paths: RunPaths) -> tuple[Any, ...]:
    """Differs when a file changed that a page shows."""
    files = (paths.settings, paths.environment, paths.metrics, paths.alerts, paths.summary, paths.ledger, paths.adapters)
    folders = (paths.checkpoints, paths.scores, paths.matches, paths.track, paths.league, paths.shards)
    producers = [file_marks(paths.shards / name) for name in sorted(names_in(paths.shards))]
    return *(file_marks(path) for path in (*files, *folders)), *producers, is_held(paths.lock)


class LiveRun:
    def __init__(self, around: Surroundings) -> None:
        self.around, self.paths = around, around.paths
        self._quick_reader, self._whole_reader = FactsReader(around.paths), FactsReader(around.paths)
        self._lock = threading.Lock()
        self._quick: tuple[Any, RunFacts] | None = None
        self._whole: tuple[Any, RunFacts] | None = None
        self._parts: dict[str, tuple[Any, Markup]] = {}
        self.asked = 0.0

    def mark(self) -> tuple[Any, ...]:
        self.asked, mark = time.monotonic(), run_mark(self.paths)
        ages = mark[-1] or not self.facts().is_over
        return mark, round(time.time() / _TICK_S) if ages else 0, tuple(made for made, _ in self._parts.values())

    def facts(self) -> RunFacts:
        """Without what takes time in proportion to the run; raises InputError if its settings cannot be read."""
        with self._lock:
            mark = run_mark(self.paths), round(time.time() / _TICK_S)
            if self._quick is None or self._quick[0] != mark:
                self._quick = mark, self._quick_reader.quick()
            return self._quick[1]

    def parts(self) -> dict[str, str]:
        """HTML by name, in the order of the page."""
        facts, drawn = self.facts(), dict(self._parts)
        if self._whole is not None:
            whole = self._whole[1]
            facts = replace(facts, rows=whole.rows, troubles=[*dict.fromkeys([*facts.troubles, *whole.troubles])])
        now = {name: Markup(part(name, PARTS[name](facts, self.around))) for name in _AT_ONCE}
        waits = Markup('<p class="quiet">This part is being drawn …</p>')
        return {name: now.get(name) or drawn.get(name, (None, waits))[1] for name in PARTS}

    @property
    def is_looked_at(self) -> bool:
        return time.monotonic() - self.asked < _LOOKED_AT_S

    def draw_next(self) -> bool:
        """Draw one part that is out of date; False if none is. Call it from one thread."""
        mark, drawn = run_mark(self.paths), [name for name in PARTS if name not in _AT_ONCE]
        try:
            if self._whole is None or self._whole[0] != mark or self._left:
                self._whole = mark, self._whole_reader.whole(shards=_SHARDS)
        except Exception as error:  # of figures that no run should have; the page shows it
            self._parts |= {name: (mark, _trouble(error)) for name in drawn}
            return False
        own = {"ordered": mark[:2] + mark[8:10], "set": mark[:2], "where": mark[:2]}  # what these parts depend on
        for name in drawn:
            made = own.get(name, (mark, self._left))
            if self._parts.get(name, (None,))[0] != made:
                try:
                    self._parts[name] = made, Markup(part(name, PARTS[name](self._whole[1], self.around)))
                except Exception as error:
                    self._parts[name] = made, _trouble(error)
                return True
        return self._left

    @property
    def is_whole(self) -> bool:
        """Whether each part was drawn once."""
        return len(self._parts) == len(PARTS) - len(_AT_ONCE)

    @property
    def _left(self) -> bool:
        return bool(self._whole and self._whole[1].rows and self._whole[1].rows.left)


def _trouble(error: Exception) -> Markup:
    return Markup('<p class="trouble">This part cannot be drawn: {}</p>').format(one_line(error))


class Drawer(threading.Thread):
    """Draws the parts of the runs that pages show."""

    def __init__(self, looked_at: Callable[[], list[LiveRun]], trains: Callable[[], bool], warm: Callable[[str], None]) -> None:
        """`warm`: called once with the name of a run whose parts are drawn."""
        super().__init__(name="entente-view-drawer")  # no daemon: one that computes while Python ends aborts the process
        self._looked_at, self._trains, self._warm = looked_at, trains, warm
        self._warmed: set[str] = set()
        self._wake, self._closed = threading.Event(), threading.Event()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            more = True
            while more and not self._closed.is_set():
                more = False
                for live in self._looked_at():
                    began = time.thread_time()
                    more = live.draw_next() or more
                    worked = time.thread_time() - began
                    self._warm_once(live.paths.root.name, live.is_whole)
                    if live.is_whole and self._trains():
                        self._closed.wait(min(_LONGEST_REST_S, _REST * worked))

    def _warm_once(self, run: str, is_whole: bool) -> None:
        if is_whole and run not in self._warmed:
            self._warmed.add(run)
            threading.Thread(target=self._load, args=(run,), name="entente-view-loader").start()

    def _load(self, run: str) -> None:
        with suppress(EntenteError):  # the page that needs it says what is missing
            self._warm(run)
