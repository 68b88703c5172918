"""The parts of a run's page. The report is all of them in one HTML file, without scripts, network access or other files; the live
page (`entente view`) shows them as they stand."""

import base64
import math
import pwd
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from entente.evaluation.score_files import ScoreRecord, measured_by
from entente.game.board import Board
from entente.game.render import draw_board, frame_around, order_locations
from entente.reports import newest, plots, sentences
from entente.reports.drawing import stand_alone
from entente.reports.explain import explain_run
from entente.reports.read_run import different, value_text
from entente.reports.run_facts import RowFacts, RunFacts
from entente.reports.write_page import Link, of_run, page_template, part
from entente.settings.layers import layered_settings, preset_names
from entente.telemetry.errors import InputError
from entente.telemetry.machine import environment
from entente.telemetry.setting_marks import leaves
from entente.telemetry.stages import STAGES
from storage.files import durable_write
from storage.runs import RunPaths

PLOTTED_MATCHES = 4
DRAWN_POSITIONS = 3
_SKETCHED, _LISTED_STEPS = 100, 12
_ROW_COUNTS = (
    ("train/decisions", "decisions trained on"),
    ("rollout/failed", "forks that failed"),
    ("rollout/orders_rejected", "orders the game engine refused"),
    ("rollout/set_aside", "damaged shards, whose start groups were replayed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a part needs besides the run's facts."""

    paths: RunPaths
    link: Link | None = None
    """Of a live page; None in a file."""
    key: str = ""


def html_of(facts: RunFacts, around: Surroundings) -> str:
    parts = {name: part(name, find(facts, around)) for name, find in PARTS.items()}
    ask = commands(facts, around.paths.root.parent, sentences.state(facts)[0])
    return page_template("page.html.jinja").render(name=facts.name, parts=parts, commands=ask)


# -- what each part says ----------------------------------------------------------------------------------------------------


def _head(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    word, state = sentences.state(facts)
    return {
        "name": facts.name,
        "model": facts.settings.get("inference", {}).get("model", "unknown"),
        "seed": facts.settings.get("seed", "unknown"),
        "owner": owner_of(around.paths),
        "state_word": word,
        "state": state,
        "verdict": sentences.verdict(facts.scores),
        "positions_from": sentences.refreshed_positions(facts.settings),
        "troubles": facts.troubles,
        "refused": (facts.rows or RowFacts()).refused,
    }


def owner_of(paths: RunPaths) -> str:
    """Who started the run: the owner of its settings; empty if this machine does not know a name."""
    try:
        return pwd.getpwuid(paths.settings.stat().st_uid).pw_name
    except (OSError, KeyError):
        return ""


def _now(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    link, name, last = around.link, facts.name, list(facts.steps.items())[-_LISTED_STEPS:]
    steps = [] if link is None else [(step, link("step", name, step=step), step_texts(figures)) for step, figures in last[::-1]]
    return {
        "progress": newest.progress(facts),
        "current": newest.current_step(around.paths, facts),
        "alerts": facts.alerts[-4:] if link else [],
        "curves": [(title, _thinned(values), words) for title, values, words in newest.curves(facts)],
        "done": facts.done,
        "newest": newest.stage_shares(facts, 1),
        "shares": newest.stage_shares(facts),
        "together": min(newest.NEWEST, len(facts.steps)),
        "meanings": STAGES,
        "steps": steps,
        "begun": max(facts.begun_step, facts.done),
        "step_form": link("step", name).partition("?")[0] if link else "",
        "key": around.key,
    }


def step_texts(figures: Mapping[str, float]) -> list[str]:
    columns = (
        ("train/reward", "{:+.2f}"),
        ("train/decisions", "{:,.0f}"),
        ("train/policy_lag_p50", "{:.0f}"),
        ("time/step_s", "{:.1f}"),
    )
    return [form.format(figures[name]) if name in figures else "" for name, form in columns]


def _thinned(values: list[float]) -> list[float]:
    return values if len(values) <= _SKETCHED else [float(part.mean()) for part in np.array_split(values, _SKETCHED)]


def _shards(count: int) -> str:
    return "1 shard is" if count == 1 else f"{count:,} shards are"


def _learned(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    return {
        "scores": plots.scores(named_scores(facts.scores)),
        "returns": plots.returns(facts),
        "counted": "" if facts.rows is None or facts.rows.left == 0 else f" {_shards(facts.rows.left)} still to be read.",
        "ladder": plots.ladder(facts.track),
        "ladder_says": sentences.ladder(facts.track),
        "not_drawn": sentences.not_drawn(facts.track),
        "league": plots.league(facts.league),
        "matches": [(plots.match(record), sentences.describe_match(record)) for record in facts.matches[-PLOTTED_MATCHES:]],
    }


def _ordered(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    positions = boards(facts.scores)
    return {"positions": positions, "thoughts": any(view["thought"] for position in positions for view in position["views"])}


def _sound(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    rows = facts.rows or RowFacts()
    counts = [("decisions rolled out", f"{max(rows.decisions, facts.decisions):,}")]
    counts += [(what, f"{facts.total(metric):,.0f}") for metric, what in _ROW_COUNTS]
    counts += [
        ("shards set aside", str(len(rows.refused))),
        *((f"failed: {reason}", str(forks)) for reason, forks in rows.failures),
    ]
    return {
        "mismatch": sentences.mismatch(facts),
        "lag_says": sentences.lag(facts),
        "health": plots.health(facts),
        "lags": plots.lags(facts),
        "counts": counts,
    }


def _time(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    return {
        "times": plots.times(facts),
        "stages": "; ".join(f"{stage}: {meaning}" for stage, meaning in STAGES.items()),
        "tokens": plots.tokens(facts),
        "limits": explain_run(facts.steps, facts.settings).sentences if facts.steps else [],
    }


@cache
def preset_trees() -> Mapping[str, Mapping[str, Any]]:
    return {name: layered_settings(name).model_dump(mode="json") for name in preset_names()}


def _set(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    preset, differences = closest_preset(facts.settings, preset_trees())
    return {
        "preset": preset,
        "differences": [(name, *map(value_text, values)) for name, values in differences],
        "settings": [(name, value_text(value)) for name, value in leaves(facts.settings).items()],
    }


def _where(facts: RunFacts, around: Surroundings) -> dict[str, Any]:
    found = facts.environment or environment()
    return {
        "stored": facts.environment is not None,
        "environment": [(what.replace("_", " "), text) for what, text in found.items()],
    }


PARTS: Mapping[str, Callable[[RunFacts, Surroundings], dict[str, Any]]] = {
    "head": _head,
    "now": _now,
    "learned": _learned,
    "ordered": _ordered,
    "sound": _sound,
    "time": _time,
    "wrong": lambda facts, around: {"alerts": facts.alerts},
    "set": _set,
    "where": _where,
}
"""By macro of run_parts.html.jinja, in the order of the page."""


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
            odds = list(zip(opening.orders, opening.probabilities, strict=True))  # a power may waive several builds
            picture = draw_board(board, {power: opening.orders}, certainty=dict(odds), frame=frame)
            orders = ", ".join(f"{order} with probability {probability:.0%}" for order, probability in odds)
            views.append(
                {
                    "who": who,
                    "picture": picture,
                    "uri": data_url(picture),
                    "alt": f"Board of {board.long_phase.lower()} with orders of {power.title()} by the {who} policy: {orders}",
                    "orders": odds,
                    "joint": math.prod(opening.probabilities),
                    "thought": opening.thought,
                }
            )
        positions.append({"phase": board.long_phase, "power": power, "centres": len(board.centres()[power]), "views": views})
    return positions


def data_url(picture: str) -> str:
    """As an address, so that the picture's styles cannot collide with those of the page."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def named_scores(records: Mapping[str, ScoreRecord]) -> list[tuple[str, ScoreRecord]]:
    kinds = {record.opponents for record in records.values()}
    newest = records.get("trained") or records.get("base")
    places = {"random": 0, "base": 2, "trained": 3}  # other scripted players come between

    def name(label: str, record: ScoreRecord) -> str:
        who = label.split("_vs_")[0]
        if record.player == "policy":
            who = f"trained, version {record.policy_version}" if record.policy_version else "base"
        elif who == "teacher":
            who = f"imitated teacher ({record.player})"
        who = f"{who} vs {record.opponents}" if len(kinds) > 1 else who
        alike = newest is None or measured_by(record)[1:] == measured_by(newest)[1:]  # the opponents are named
        return who if alike else f"{who}, measured otherwise"

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
