"""Plots of a run or of several, each an SVG element; None if there is nothing to draw."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from entente.decoding.model_files import RECIPE
from entente.evaluation.intervals import Estimate, format_count
from entente.evaluation.match_files import MatchRecord
from entente.evaluation.match_table import MEASURES, PAR
from entente.evaluation.score_files import ScoreRecord, TrackPoint
from entente.reports.compared import Compared
from entente.reports.drawing import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    Panel,
    Values,
    plot,
    rows_plot,
    stand_alone,
)
from entente.reports.run_facts import RunFacts
from entente.telemetry.metrics import ORDER_KINDS
from entente.telemetry.stages import STAGES, stages_of
from storage.files import durable_write
from storage.json_files import read_object
from storage.league_files import LeagueStep

CURVE = "curve.svg"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, YELLOW, BROWN)
"""Of the runs of a comparison, in all its plots."""
MOST_ROWS = 40
_STAGES = dict(zip(STAGES, (BLUE, PINK, TEAL, PURPLE, ORANGE, YELLOW, BROWN, RED, GREEN, NAVY, GREY), strict=True))
_LAGS = {"0": ("its own", GREEN), "1": ("1 behind", BLUE), "2": ("2 behind", ORANGE), "more": ("more", RED)}
Series = Sequence[tuple[str, str, Sequence[float]]]
"""Name, colour, a value per step."""


def returns(facts: RunFacts) -> str | None:
    """Mean return of each step's training rows, with its interval."""
    mean = np.array(facts.series("train/reward"))
    if not np.isfinite(mean).any():
        return None
    panel, steps = Panel(label="mean return", high=200), np.arange(1, facts.done + 1)
    bounded = [(point, bounds) for point in facts.curve if (bounds := point.mean_return.interval) is not None]
    edges = [edge for point, _ in bounded for edge in (point.first - 0.5, point.last + 0.5)]
    low, high = ([bounds[end] for _, bounds in bounded for _ in (0, 1)] for end in (0, 1))
    panel.band(edges, low, high, BLUE, "95 % interval" if bounded else "")
    panel.line(steps, mean, BLUE, "rows trained on")
    if facts.rows is not None:
        everything = [facts.rows.return_of_all.get(step - 1, np.nan) for step in steps.tolist()]
        panel.line(steps, everything, ORANGE, "all rows sampled", dashed=True)
    known = mean[np.isfinite(mean)]
    return plot([panel], "step", f"Mean return per step: {known[0]:+.2f} at first, {known[-1]:+.2f} at last.", steps=facts.done)


def tokens(facts: RunFacts) -> str | None:
    if not facts.steps:
        return None
    prompt, cached, completion = (
        np.array(facts.series(f"rollout/{name}")) / 1000 for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    above = Panel(label="thousand tokens")
    above.stack(
        [("prompt, computed", BLUE, prompt - cached), ("prompt, cached", GREY, cached), ("completion", ORANGE, completion)]
    )
    below = Panel(label="prefix hits", high=80, per_cent=True, low=0, top=1)
    below.line(range(1, facts.done + 1), facts.series("rollout/prefix_hit_share"), GREY)
    share = np.nansum(cached) / max(np.nansum(prompt), 1e-9)
    return plot([above, below], "step", f"Tokens per step; {share:.0%} of prompt tokens were cached.", steps=facts.done)


def times(facts: RunFacts) -> str | None:
    if not facts.steps:
        return None
    each = [stages_of(facts.steps.get(step, {})) for step in range(1, facts.done + 1)]
    parts = [(name, colour, np.array([stages[name] for stages in each])) for name, colour in _STAGES.items()]
    panel = Panel(label="seconds of wall time", high=190)
    panel.stack(parts)
    whole = sum(float(values.sum()) for _, _, values in parts) or 1.0
    summary = ", ".join(f"{name} {values.sum() / whole:.0%}" for name, _, values in parts)
    return plot([panel], "step", f"Wall time of the steps by stage: {summary}.", steps=facts.done)


def lags(facts: RunFacts) -> str | None:
    """Share of each step's rows by policy lag; None if all are 0."""
    measured = np.array([facts.series(f"train/policy_lag_{lag}_share") for lag in _LAGS])
    shares, trained = dict(zip(_LAGS, np.nan_to_num(measured), strict=True)), np.isfinite(measured).any(axis=0)
    if not any(shares[lag].any() for lag in ("1", "2", "more")):
        return None
    panel = Panel(label="rows trained", per_cent=True, low=0, top=1)
    panel.stack([(*_LAGS[lag], values) for lag, values in shares.items() if values.any()])
    summary = ", ".join(f"{_LAGS[lag][0]} {values[trained].mean():.0%}" for lag, values in shares.items())
    return plot([panel], "step", f"Rows trained by policy lag, means over the steps: {summary}.", steps=facts.done)


_HEALTH: Sequence[tuple[str, str, Mapping[str, tuple[str, str]], bool, str]] = (
    (
        "entropy",
        "nats",
        {"train/entropy": ("mean over the legal set", BLUE)},
        False,
        "Entropy: how undecided the policy is among legal tokens. A fall to 0 in a few steps is a collapse.",
    ),
    (
        "clipping",
        "share of tokens",
        {
            "train/clip_ratio_low": ("low", BLUE),
            "train/clip_ratio_high": ("high", ORANGE),
            "train/outlier_share": ("left out", GREY),
        },
        True,
        "Clip fractions: tokens whose ratio was clipped from below or above, and outliers left out of the loss.",
    ),
    (
        "legal mass",
        "share",
        {"train/legal_mass_p50": ("median", GREEN), "train/legal_mass_p10": ("10th percentile", PURPLE)},
        True,
        "Legal mass: probability of legal tokens without the mask. The loss does not train it; the mask enforces legality.",
    ),
    (
        "gradient",
        "norm",
        {"train/grad_norm": ("largest of the step's updates", ORANGE)},
        False,
        "Gradient norm before it is clipped to 1.",
    ),
    (
        "mismatch",
        "nats",
        {"train/log_ratio_lag0_p50": ("median", BLUE), "train/log_ratio_lag0_p99": ("99th percentile", ORANGE)},
        False,
        "Trainer and engine: |log ratio| of the tokens that the version trained sampled itself, before its first update.",
    ),
)


def health(facts: RunFacts) -> list[tuple[str, str]]:
    """Plots of the training's figures, each with its sentence; empty before the first step."""
    drawn = []
    for name, unit, series, per_cent, sentence in _HEALTH if facts.steps else ():
        shown = [(label, colour, facts.series(metric)) for metric, (label, colour) in series.items()]
        drawn.append((_lines(facts, name, unit, shown, per_cent=per_cent), sentence))
    return [*drawn, *masked(facts)]


def masked(facts: RunFacts) -> list[tuple[str, str]]:
    """The share of tokens without a policy gradient, by kind of order; empty if the run did not measure it."""
    colours = dict(zip(ORDER_KINDS, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
    panels, words = [], []
    for effect in ("effect", "no_effect"):
        panel = Panel(label=effect.replace("_", " "), high=110, per_cent=True, low=0)
        for kind, colour in colours.items():
            values = facts.series(f"train/masked_{kind}_{effect}_share")
            if known := [value for value in values if np.isfinite(value)]:
                panel.line(range(1, facts.done + 1), values, colour, kind if effect == "effect" or not panels else "")
                words.append(f"{kind} with {effect.replace('_', ' ')} {sum(known) / len(known):.1%}")
        if panel.seen:
            panels.append(panel)
    if not panels:
        return []
    sentence = (
        "Masked tokens by kind of order: of the branching tokens of the orders with effect (above) and without (below), those "
        "that give no policy gradient, because they were clipped or left out. A mask that takes the moves takes what decides."
    )
    return [
        (
            plot(panels, "step", f"Masked share by kind of order, means over the steps: {', '.join(words)}.", steps=facts.done),
            sentence,
        )
    ]


def _lines(facts: RunFacts, name: str, unit: str, series: Series, *, per_cent: bool = False) -> str:
    panel = Panel(label=unit, high=140, per_cent=per_cent)
    for label, colour, values in series:
        panel.line(range(1, facts.done + 1), values, colour, label)
    panel.low = min(0.0, *panel.seen) if panel.seen else 0.0
    known = {label: [value for value in values if np.isfinite(value)] for label, _, values in series}
    summary = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}" for label, values in known.items() if values)
    return plot([panel], "step", f"{name}: {summary}.", steps=facts.done)


# -- playing strength -------------------------------------------------------------------------------------------------------


def scores(records: Sequence[tuple[str, ScoreRecord]]) -> str | None:
    rows = [(name, record.score.estimate, _colour(record)) for name, record in records]
    summary = "; ".join(f"{name} {record.score.mean:+.2f}" for name, record in records)
    return dots(rows, "centres gained", f"Scores on held-out positions: {summary}.", "{:+.2f}", 0.0)


def ladder(track: Sequence[TrackPoint]) -> str | None:
    """Strength by policy version; None for fewer than three versions that can be compared."""
    points = [point for point in track if point.comparable]
    if len(points) < 3:
        return None
    panel = Panel(label="centres gained")
    _estimates(panel, [point.version for point in points], [point.score for point in points], BLUE)
    summary = "; ".join(f"version {point.version} {point.score.mean:+.2f}" for point in points)
    return plot([panel], "policy version", f"Strength by version against {points[0].opponents}: {summary}.")


def match(record: MatchRecord) -> str | None:
    measure = record.settings.measure
    meaning, is_share, _ = MEASURES[measure]
    standings = sorted(record.table.players, key=lambda standing: -standing.measures[measure].mean)
    rows = [(s.player, s.measures[measure], BLUE if _is_version(s.player) else GREY) for s in standings]
    summary = "; ".join(f"{s.player} {s.measures[measure].mean:.3f}" for s in standings)
    par = PAR if is_share and measure in ("sos", "win") else None
    return dots(rows, meaning, f"{record.table.games} games: {summary}.", "{:.1%}" if is_share else "{:.2f}", par)


def match_by_year(record: MatchRecord) -> str | None:
    players = [player for player in record.table.players if len(player.by_year) > 1]
    if not players:
        return None
    first, what = (1901, "year") if record.settings.start == "standard" else (1, "year since the start")
    panel = Panel(label="mean centres at its end")
    lines = product((False, True), (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, BROWN, GREY))
    for player, (dashed, colour) in zip(players, cycle(lines), strict=False):
        _estimates(panel, range(first, first + len(player.by_year)), player.by_year, colour, player.player, dashed=dashed)
    panel.rule(34 / 7)
    summary = "; ".join(f"{player.player} {player.by_year[-1].mean:.2f}" for player in players)
    return plot([panel], what, f"Centres by {what}, at last {summary}.")


def league(newest: LeagueStep | None) -> str | None:
    if newest is None:
        return None
    rows = [
        (f"v{member.version}", member.win_share, None, BLUE, f"{member.games} forks, weight {member.weight:.2f}")
        for member in newest.members
    ]
    summary = "; ".join(f"v{member.version} {member.win_share:.2f}" for member in newest.members)
    alt = f"Win shares of the policy against the league of step {newest.step}: {summary}."
    return rows_plot(rows, "win share of the policy", alt, line=0.5, bars=True, ends=(0, 1.3)) if rows else None


def dots(rows: Sequence[tuple[str, Estimate, str]], label: str, alt: str, form: str, line: float | None) -> str | None:
    if not rows:
        return None
    bounded = any(estimate.interval is not None for _, estimate, _ in rows)
    label = f"{label}, {'with 95 % interval' if bounded else 'too few clusters for an interval'}"
    drawn = [(name, found.mean, found.interval, colour, form.format(found.mean)) for name, found, colour in rows]
    return rows_plot(drawn, label, alt, line=line)


def _estimates(
    panel: Panel, places: Values, estimates: Sequence[Estimate], colour: str, name: str = "", *, dashed: bool = False
) -> None:
    low, high = np.array([each.interval or (np.nan, np.nan) for each in estimates]).T
    panel.band(places, low, high, colour)
    panel.line(places, [each.mean for each in estimates], colour, name, dashed=dashed)


def _is_version(player: str) -> bool:
    return player.split(":")[-1] == "base" or player.split(":")[-1].lstrip("v").isdecimal()


def _colour(record: ScoreRecord) -> str:
    if record.player != "policy":
        return GREY
    return BLUE if record.policy_version else ORANGE


# -- several runs -----------------------------------------------------------------------------------------------------------


def compared_returns(compared: Compared) -> str | None:
    drawn = [(run, colour) for run, colour in zip(compared.runs, COLOURS, strict=False) if run.curve]
    if not drawn:
        return None
    panel = Panel(label="mean return", high=200)
    for run, colour in drawn:
        places = [(point.first + point.last) / 2 for point in run.curve]
        _estimates(panel, places, [point.mean_return for point in run.curve], colour, run.name)
    ends = "; ".join(f"{run.name} {run.curve[-1].mean_return.mean:+.2f}" for run, _ in drawn)
    return plot([panel], "step", f"Mean return by step, at last: {ends}.")


def compared_scores(compared: Compared) -> str | None:
    colours = {run.name: colour for run, colour in zip(compared.runs, COLOURS, strict=False)}
    first = compared.runs[0].name
    rows = [
        (
            pair.label if len(compared.runs) == 2 else f"{pair.other}, {pair.label}",
            pair.comparison.difference,
            colours[pair.other],
        )
        for pair in compared.paired
        if not isinstance(pair.comparison, str)
    ]
    summary = "; ".join(f"{name} {difference.mean:+.2f}" for name, difference, _ in rows)
    alt = f"Differences from {first} on the same positions: {summary}."
    return dots(rows, f"centres gained more than {first}", alt, "{:+.2f}", 0.0)


# -- a table ---------------------------------------------------------------------------------------------------------------


def of_table(table: pa.Table) -> str | None:
    """Numeric columns over the first one: lines where that is of numbers, one for each text of a column if its values repeat;
    else a row for each of its values. None if neither fits, or there are more lines than colours."""
    names = table.column_names
    numbers = [name for name in names[1:] if _is_number(table, name)]
    if not numbers or len(set(names)) < len(names) or table.num_rows < 2:
        return None
    first = names[0]
    columns = {
        name: np.array([math.nan if value is None else float(value) for value in table[name].to_pylist()]) for name in numbers
    }
    if not _is_number(table, first):
        rows = [
            (str(name), value, None, BLUE, f"{value:.4g}")
            for name, value in zip(table[first].to_pylist(), columns[numbers[0]].tolist(), strict=True)
        ]
        rows = [row for row in rows if math.isfinite(row[1])]
        return rows_plot(rows, numbers[0], f"{numbers[0]} by {first}", line=0.0) if 0 < len(rows) <= MOST_ROWS else None
    across = np.array([math.nan if value is None else float(value) for value in table[first].to_pylist()])
    series = [(name, columns[name], np.isfinite(across)) for name in numbers]
    if len(np.unique(across)) < len(across):
        kinds = next(([str(value) for value in table[name].to_pylist()] for name in names[1:] if name not in numbers), None)
        if kinds is None or len(set(kinds)) > len(COLOURS):
            return None
        if len({*zip(across.tolist(), kinds, strict=True)}) < len(kinds):  # a line would run through rows of different kinds
            return None
        numbers = [next((name for name in numbers if not pa.types.is_integer(table.schema.field(name).type)), numbers[0])]
        series = [(kind, columns[numbers[0]], np.array([each == kind for each in kinds])) for kind in dict.fromkeys(kinds)]
    if len(series) > len(COLOURS):
        return None
    panel = Panel(label=numbers[0] if len(numbers) == 1 else "")
    for (name, values, chosen), colour in zip(series, COLOURS, strict=False):
        order = np.argsort(across[chosen], kind="stable")
        panel.line(across[chosen][order], values[chosen][order], colour, name)
    return plot([panel], first, f"{', '.join(numbers)} by {first}") if panel.seen else None


def _is_number(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


# -- imitation --------------------------------------------------------------------------------------------------------------


def write_curve(model: Path) -> None:
    durable_write(model / CURVE, stand_alone(imitation_plot(read_object(model / RECIPE)["curve"])).encode())


def imitation_plot(curve: Sequence[Mapping[str, Any]]) -> str:
    """Imitation's learning curve: losses, and the share of orders equal to the teacher's. `curve`: by ascending step."""
    above = Panel(label="nats a token", log=True)
    for name, label, colour in (
        ("order_loss", "held out, per order token", BLUE),
        ("completion_loss", "held out, per completion token", ORANGE),
        ("loss", "trained on", GREY),
    ):
        known = [(point["step"], point[name]) for point in curve if point[name] is not None]
        if known:
            above.line([step for step, _ in known], [loss for _, loss in known], colour, label)
    below = Panel(label="orders equal", high=100, per_cent=True, low=0, top=1)
    below.line([point["step"] for point in curve], [point["orders_equal"] for point in curve], GREEN)
    last = curve[-1]
    result = f"{last['order_loss']:.2f} nats per order token and {last['orders_equal']:.0%} of orders equal"
    return plot([above, below], "step", f"Imitation: after {format_count(last['step'], 'steps')} {result}.")
