"""A copy of the run that the tests share, to be cut and damaged; and the page as a reader's program sees it."""

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from entente.reports.page import Surroundings, html_of
from entente.reports.run_facts import RunFacts, read_facts
from storage.runs import RunPaths

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """The page read by something that is no browser: its tags must nest, and a column's head be aligned as its cells, or reading
    fails."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.headed = False
        self.aligned: list[list[bool]] = []
        """For each row of the table that is read: whether its cells are aligned as numbers."""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.headed, self.aligned = False, []
        self.headed |= tag == "thead"
        if tag == "tr":
            self.rows.append([])
            self.aligned.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.aligned[-1].append("number" in self.elements[-1][1].get("class", "").split())

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table" and self.headed:
            head, *rows = self.aligned
            whole = [row for row in rows if len(row) == len(head)]
            assert not whole or head == [all(column) for column in zip(*whole, strict=True)], self.rows[-len(self.aligned)]

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        """All words, single-spaced."""
        return " ".join(" ".join(self.words).split())

    def count(self, what: str) -> int:
        """The number beside `what` in a table."""
        (value,) = [row[1] for row in self.rows if row[:1] == [what]]
        return int(value.replace(",", ""))


@pytest.fixture
def run_folder(trained: tuple[dict[str, Any], RunPaths, object], tmp_path: Path) -> RunPaths:
    """A copy of the whole run, its own to change."""
    return RunPaths(shutil.copytree(trained[1].root, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("wandb")))


@pytest.fixture
def page_of() -> Callable[[RunPaths], Page]:
    """Makes the page of a run's folder and reads it."""
    return lambda paths: Page(html_of(read_facts(paths), Surroundings(paths=paths)))


def metric_lines(paths: RunPaths) -> list[dict[str, float]]:
    """The run's records, read on our own."""
    return [json.loads(line) for line in paths.metrics.read_text().splitlines()]


SETTINGS = {
    "steps": 4,
    "training": {"dtype": "float32"},
    "inference": {"dtype": "float32"},
}


def facts(**changes: Any) -> RunFacts:
    """Facts of a run that has nothing but settings, with these changes."""
    given = {
        "name": "mine",
        "settings": SETTINGS,
        "steps": {},
        "mismatch": {},
        "summary": None,
        "quiet_s": 1.0,
        "at_work": False,
        "environment": None,
        "alerts": [],
        "troubles": [],
    }
    return RunFacts(**given | changes)
