"""Builds the report of a run: one HTML file without scripts, network access or other files."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluation.score_files import ScoreRecord
from reports import pipeline_plots, plots, sentences, strength_plots
from reports.drawing import stand_alone
from reports.imitation_plot import curve_of_base
from reports.match_sentence import describe_match
from reports.openings import shown_positions
from reports.read_run import RunFacts
from reports.replay_page import still
from reports.replayed import read_game
from reports.settings_tree import compare, flat, value_text
from reports.write_page import check_folder, page_template
from storage.run_roots import as_given
from storage.runs import RunPaths, durable_write
from telemetry.errors import EntenteError, InputError
from telemetry.machine import environment
from telemetry.plain_text import shown
from telemetry.stages import STAGES

MATCHES_SHOWN = 4
"""Number of the newest matches that get a plot."""
_ROW_COUNTS = (
    ("rollout/decisions", "decisions rolled out"),
    ("train/decisions", "decisions trained on"),
    ("rollout/failed", "forks that failed"),
    ("rollout/orders_rejected", "orders the game engine refused"),
    ("rollout/set_aside", "damaged shards found and played again"),
)


def write_report(facts: RunFacts, file: Path, presets: Mapping[str, Mapping[str, Any]], runs_root: Path) -> None:
    """Write the page to `file`; `presets` are the settings trees that the run's are compared with."""
    check_folder(file, "report")
    durable_write(file, html_of(facts, presets, runs_root).encode())


def html_of(facts: RunFacts, presets: Mapping[str, Mapping[str, Any]], runs_root: Path) -> str:
    """The page as text."""
    template = page_template("page.html.jinja")
    word, state = sentences.state(facts)
    positions = shown_positions(facts.scores)
    return template.render(
        name=facts.name,
        model=facts.settings.get("inference", {}).get("model", "unknown"),
        seed=facts.settings.get("seed", "unknown"),
        state_word=word,
        state=state,
        verdict=sentences.simulated(facts) or sentences.verdict(facts.scores),
        steps=facts.done,
        plots={
            "returns": plots.returns(facts),
            "scores": strength_plots.scores(named_scores(facts.scores)),
            "ladder": strength_plots.ladder(facts.track),
            "rated": strength_plots.rated(facts.ratings),
            "league": strength_plots.league(facts.league),
            "lags": pipeline_plots.lags(facts),
            "lags_by_step": pipeline_plots.lags_by_step(facts),
            "times": pipeline_plots.times(facts),
            "queue": pipeline_plots.queue(facts),
            "producers": pipeline_plots.producers(facts),
            "tokens": plots.tokens(facts),
            "imitation": curve_of_base(str(facts.settings.get("inference", {}).get("model", ""))),
        },
        matches=[
            (strength_plots.match(record, number), describe_match(record))
            for number, record in enumerate(facts.matches[-MATCHES_SHOWN:])
        ],
        limits=sentences.limits(facts),
        queue_says=sentences.queue(facts),
        ladder_says=sentences.ladder(facts.track),
        lag_says=sentences.lag(facts),
        alerts=facts.alerts,
        producers=facts.producers,
        played=facts.rows.played if len(facts.rows.played) > 1 else [],
        score_rows=named_scores(facts.scores),
        lags=facts.rows.lags,
        stages="; ".join(f"{stage}: {meaning}" for stage, meaning in STAGES.items()),
        times_note=sentences.hidden_rollouts(facts),
        health=plots.health(facts),
        mismatch=sentences.mismatch(facts),
        counts=[(what, f"{facts.total(metric):,.0f}") for metric, what in _ROW_COUNTS],
        failures=facts.rows.failures,
        refused=facts.rows.refused,
        troubles=facts.troubles,
        positions=positions,
        thoughts=any(view.thought for position in positions for view in position.views),
        comparison=compare(facts.settings, presets),
        settings=flat(facts.settings),
        environment=facts.environment or environment(),
        environment_stored=facts.environment is not None,
        commands=commands(facts, runs_root, word),
        value=value_text,
        per_cent=_per_cent,
        shown=shown,
    )


def named_scores(records: Mapping[str, ScoreRecord]) -> list[tuple[str, ScoreRecord]]:
    """Scores in the order of the plot, each named by player and opponents."""
    kinds = {record.opponents for record in records.values()}
    places = {"random": 0, "base": 2, "trained": 3}  # other scripted players come between

    def name(label: str, record: ScoreRecord) -> str:
        who = label.split("_vs_")[0]
        if record.player == "policy":
            who = f"trained, version {record.policy_version}" if record.policy_version else "base"
        elif who == "teacher":
            who = f"imitated teacher ({record.player})"
        return f"{who} vs {record.opponents}" if len(kinds) > 1 else who

    def place(label: str, record: ScoreRecord) -> tuple[bool, str, int]:
        return "_vs_" in label, record.opponents, places.get(label.split("_vs_")[0], 1)

    ordered = sorted(records.items(), key=lambda item: place(*item))
    return [(name(label, record), record) for label, record in ordered]


def write_pictures(facts: RunFacts, folder: Path, paths: RunPaths, model: Path | None) -> list[Path]:
    """Write learning curve, strength by version, first board and newest game as separate pictures, if they exist.

    `model` is the folder of the run's model: without it the game's orders are drawn as if nobody knew how sure they were.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder '{folder}' to write pictures to: make it first")
    positions = shown_positions(facts.scores, 1)
    plotted = {
        "curve.svg": plots.returns(facts),
        "ladder.svg": strength_plots.ladder(facts.track),
        "ratings.svg": strength_plots.rated(facts.ratings),
    }
    pictures = {name: stand_alone(plot) for name, plot in plotted.items() if plot}
    if positions:
        pictures["board.svg"] = positions[0].views[-1].picture
    with suppress(EntenteError):  # a run without games or boards has no such picture
        pictures["replay.svg"] = still(read_game(paths, "latest", model))
    for name, text in pictures.items():
        durable_write(folder / name, text.encode())
    return [folder / name for name in pictures]


def commands(facts: RunFacts, runs_root: Path, state: str) -> list[tuple[str, str]]:
    """Further commands for this run: a reason and the command line."""
    run = f"--run {shlex.quote(facts.name)}"
    if runs_root != Path("runs"):
        run += f" --runs-root {shlex.quote(as_given(runs_root))}"
    by_power = "select policy_version, power, count(*), avg(centres_gained) from decisions group by all order by all"
    best = 'select power, phase, policy_version, "return" from decisions order by "return" desc limit 10'
    by_step = "select step, count(*), avg(policy_lag) from batches group by all order by all"
    failed = "select status, reason, count(*) from decisions group by all order by all"
    found = [
        ("Gain by version and power", f"entente sql {run} {shlex.quote(by_power)}"),
        ("Decisions that paid most", f"entente sql {run} {shlex.quote(best)}"),
        ("What each step trained on", f"entente sql {run} {shlex.quote(by_step)}"),
        ("Decisions of forks that failed, and why", f"entente sql {run} {shlex.quote(failed)}"),
        ("Step through the newest game", f"entente replay latest {run} --open"),
        ("Score the base again", f"entente evaluate {run} --version 0"),
    ]
    if facts.done:
        found.append(("Score the newest version", f"entente evaluate {run}"))
    if state in ("cut", "empty"):
        found.insert(0, ("Go on where it stopped", f"entente train {run} --resume"))
    return found


def _per_cent(share: float) -> str:
    """A probability as a short text."""
    if share < 1e-4:
        return "< 0.01 %"
    digits = 0 if share >= 0.1 else 1 if share >= 0.01 else 2
    return f"{100 * share:.{digits}f} %"
