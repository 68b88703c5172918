"""Builds the report of a run: one HTML file without scripts, network access or other files."""

import base64
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entente.evaluation.score_files import ScoreRecord
from entente.game.board import Board
from entente.game.render import draw_board, frame_around, order_locations
from entente.reports import plots, sentences
from entente.reports.drawing import stand_alone
from entente.reports.explain import explain_run
from entente.reports.read_run import different, value_text
from entente.reports.run_facts import RowFacts, RunFacts
from entente.reports.write_page import of_run, page_template, write_page
from entente.settings.layers import leaves
from entente.telemetry.errors import InputError
from entente.telemetry.machine import environment
from entente.telemetry.progress import shown
from entente.telemetry.stages import STAGES
from storage.files import durable_write

PLOTTED_MATCHES = 4
DRAWN_POSITIONS = 3
_ROW_COUNTS = (
    ("train/decisions", "decisions trained on"),
    ("rollout/failed", "forks that failed"),
    ("rollout/orders_rejected", "orders the game engine refused"),
    ("rollout/set_aside", "damaged shards, whose start groups were replayed"),
)


def write_report(facts: RunFacts, file: Path, presets: Mapping[str, Mapping[str, Any]], runs_root: Path) -> None:
    write_page(file, html_of(facts, presets, runs_root), "report")


def html_of(facts: RunFacts, presets: Mapping[str, Mapping[str, Any]], runs_root: Path) -> str:
    template = page_template("page.html.jinja")
    word, state = sentences.state(facts)
    positions, rows = boards(facts.scores), facts.rows or RowFacts()
    preset, differences = closest_preset(facts.settings, presets)
    return template.render(
        name=facts.name,
        model=facts.settings.get("inference", {}).get("model", "unknown"),
        seed=facts.settings.get("seed", "unknown"),
        state_word=word,
        state=state,
        verdict=sentences.verdict(facts.scores),
        positions_from=sentences.refreshed_positions(facts.settings),
        steps=facts.done,
        plots={
            "returns": plots.returns(facts),
            "scores": plots.scores(named_scores(facts.scores)),
            "ladder": plots.ladder(facts.track),
            "league": plots.league(facts.league),
            "lags": plots.lags(facts),
            "times": plots.times(facts),
            "tokens": plots.tokens(facts),
        },
        matches=[
            (plots.match(record, number), sentences.describe_match(record))
            for number, record in enumerate(facts.matches[-PLOTTED_MATCHES:])
        ],
        limits=explain_run(facts.steps, facts.settings).sentences if facts.steps else [],
        ladder_says=sentences.ladder(facts.track),
        lag_says=sentences.lag(facts),
        alerts=facts.alerts,
        stages="; ".join(f"{stage}: {meaning}" for stage, meaning in STAGES.items()),
        health=plots.health(facts),
        mismatch=sentences.mismatch(facts),
        counts=[("decisions rolled out", f"{rows.decisions if facts.rows else facts.decisions:,}")]
        + [(what, f"{facts.total(metric):,.0f}") for metric, what in _ROW_COUNTS],
        failures=rows.failures,
        refused=rows.refused,
        troubles=facts.troubles,
        positions=positions,
        thoughts=any(view["thought"] for position in positions for view in position["views"]),
        preset=preset,
        differences=differences,
        settings=leaves(facts.settings),
        environment=facts.environment or environment(),
        environment_stored=facts.environment is not None,
        commands=commands(facts, runs_root, word),
        value=value_text,
        per_cent=_per_cent,
        shown=shown,
    )


def closest_preset(
    settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> tuple[str, list[tuple[str, list[Any]]]]:
    """The preset with the fewest differences, and (name, [the run's value, the preset's value]) of each."""
    differences = {name: different({"run": leaves(settings), name: leaves(tree)}) for name, tree in presets.items()}
    preset = min(differences, key=lambda name: len(differences[name]))
    return preset, differences[preset]


def boards(records: Mapping[str, ScoreRecord], count: int = DRAWN_POSITIONS) -> list[dict[str, Any]]:
    """Boards of the first positions that "base" and "trained" both decided, or that the only one decided.

    Both sample with the same seed, so only the weights differ."""
    players = [records[label] for label in ("base", "trained") if label in records]
    if not players:
        return []
    openings = [{(opening.snapshot.snapshot_id, opening.power): opening for opening in each.score.openings} for each in players]
    positions = []
    for key in [key for key in openings[0] if all(key in held for held in openings)][:count]:
        decided = [held[key] for held in openings]
        board, power = Board.restore(decided[0].snapshot), decided[0].power
        frame = frame_around(place for each in decided for place in order_locations(board, power, each.orders))
        views = []
        for record, opening in zip(players, decided, strict=True):
            who = f"version {record.policy_version}" if record.policy_version else "base"
            odds = dict(zip(opening.orders, opening.probabilities, strict=True))
            picture = draw_board(board, {power: opening.orders}, certainty=odds, frame=frame)
            orders = ", ".join(f"{order} with probability {probability:.0%}" for order, probability in odds.items())
            views.append(
                {
                    "who": who,
                    "picture": picture,
                    # A data URL, so that the picture's ids and styles cannot collide with those of the page.
                    "uri": "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode(),
                    "alt": f"Board of {board.long_phase.lower()} with orders of {power.title()} by the {who} policy: {orders}",
                    "orders": list(odds.items()),
                    "joint": math.prod(opening.probabilities),
                    "thought": opening.thought,
                }
            )
        positions.append({"phase": board.long_phase, "power": power, "centres": len(board.centres()[power]), "views": views})
    return positions


def named_scores(records: Mapping[str, ScoreRecord]) -> list[tuple[str, ScoreRecord]]:
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


def write_pictures(facts: RunFacts, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"there is no folder '{folder}' to write pictures to: create it")
    curve, positions = plots.returns(facts), boards(facts.scores, 1)
    pictures = {"curve.svg": stand_alone(curve)} if curve else {}
    if positions:
        pictures["board.svg"] = positions[0]["views"][-1]["picture"]
    for name, text in pictures.items():
        durable_write(folder / name, text.encode())
    return [folder / name for name in pictures]


def commands(facts: RunFacts, runs_root: Path, state: str) -> list[tuple[str, str]]:
    run = of_run(facts.name, runs_root)
    failed = "select status, reason, count(*) from decisions group by all order by all"
    lines = [
        ("Gain by version and power", f"entente sql {run} @return_by_version_and_power"),
        ("What each step trained on", f"entente sql {run} @what_a_step_trained_on"),
        ("Decisions of forks that failed, and why", f"entente sql {run} {shlex.quote(failed)}"),
        ("Step through the newest game", f"entente replay latest {run} --open"),
        ("Score the base again", f"entente evaluate {run} --version 0"),
    ]
    if facts.done:
        lines.append(("Score the newest version", f"entente evaluate {run}"))
    if state in ("cut", "empty"):
        lines.insert(0, ("Continue the run", f"entente train {run} --resume"))
    return lines


def _per_cent(share: float) -> str:
    if share < 1e-4:
        return "< 0.01 %"
    digits = 0 if share >= 0.1 else 1 if share >= 0.01 else 2
    return f"{100 * share:.{digits}f} %"
