"""Builds the page of a comparison: one HTML file without scripts, network access or other files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entente.evaluation.intervals import format_interval
from entente.evaluation.score_files import ScoreRecord
from entente.reports import plots, sentences
from entente.reports.compared import TOTALS, Compared
from entente.reports.read_run import value_text
from entente.reports.run_facts import RunFacts
from entente.reports.write_page import page_template


def html_of(comparison: Compared, runs_root: Path, **live: Any) -> str:
    """`live`: what a live page has besides (`nav`, `nonce`, `script`)."""
    template = page_template("compare.html.jinja")
    first = comparison.runs[0].name
    return template.render(
        names=[run.name for run in comparison.runs],
        colours=plots.COLOURS,
        verdicts=sentences.verdicts(comparison),
        troubles=[f"{run.name}: {sentence}" for run in comparison.runs for sentence in run.troubles],
        plots={"returns": plots.compared_returns(comparison), "paired": plots.compared_scores(comparison)},
        steps_together=max((point.last - point.first + 1 for run in comparison.runs for point in run.curve), default=1),
        scores=score_rows(comparison),
        paired=[
            f"{pair.label}: {sentences.paired(pair, first)}"
            for pair in comparison.paired
            if pair.label != sentences.HEADLINE and not isinstance(pair.comparison, str)
        ],
        settings=comparison.settings,
        environment=comparison.environment,
        totals=total_rows(comparison.runs),
        commands=sentences.next_commands(comparison, runs_root),
        value=value_text,
        **live,
    )


def total_rows(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    return [(meaning, [_figure(name, count(run)) for run in runs]) for name, (meaning, count) in TOTALS.items()]


def score_rows(comparison: Compared) -> list[tuple[str, list[str]]]:
    """(label, the score of each run with its interval; empty if not measured)."""
    labels = dict.fromkeys(label for run in comparison.runs for label in run.scores)
    return [(label, [_score(run.scores.get(label)) for run in comparison.runs]) for label in labels]


def _score(record: ScoreRecord | None) -> str:
    if record is None:
        return ""
    return f"{record.score.mean:+.2f} {format_interval(record.score.estimate.interval, '+.2f')}"


def _figure(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.2f}" if name.endswith("_s") and value < 1000 else f"{value:,.0f}"
