"""Plots of the report, each an SVG element; None if there is nothing to draw."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from entente.decoding.model_files import RECIPE
from entente.evaluation.intervals import Estimate
from entente.evaluation.match_files import MatchRecord
from entente.evaluation.match_table import MEASURES, PAR
from entente.evaluation.score_files import ScoreRecord, TrackPoint
from entente.reports.drawing import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INK,
    NAVY,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    legend_above,
    marker,
    new_plot,
    share_axis,
    stack,
    stand_alone,
    step_axis,
    to_svg,
    whole_axis,
)
from entente.reports.run_facts import RunFacts
from entente.telemetry.stages import STAGES, stages_of
from storage.files import durable_write
from storage.json_files import read_object
from storage.league_files import LeagueStep

CURVE = "curve.svg"
_COLOURS = dict(zip(STAGES, (BLUE, PINK, TEAL, PURPLE, ORANGE, YELLOW, BROWN, RED, GREEN, NAVY, GREY), strict=True))
_LAGS = (("0", GREEN), ("1", BLUE), ("2", ORANGE), ("more", RED))
Series = Sequence[tuple[str, str, Sequence[float] | np.ndarray]]
"""Name, colour, a value per step."""


def returns(facts: RunFacts) -> str | None:
    """Mean return of each step's training rows, with its interval."""
    mean = np.array(facts.series("train/reward"))
    if not np.isfinite(mean).any():
        return None
    figure, (axes,) = new_plot(high=3.2)
    steps = np.arange(1, facts.done + 1)
    bounded = [(point, bounds) for point in facts.curve if (bounds := point.mean_return.interval) is not None]
    edges = [(point.first - 0.5, point.last + 0.5, *bounds) for point, bounds in bounded]
    for number, (begin, end, low, high) in enumerate(edges):
        name = "95 % interval" if not number else None
        axes.fill_between([begin, end], low, high, color=BLUE, alpha=0.18, linewidth=0, label=name)
    axes.plot(steps, mean, color=BLUE, marker=marker(facts.done), markersize=4, label="rows trained on")
    drawn = [facts.rows.return_of_all.get(step - 1, np.nan) if facts.rows else np.nan for step in steps.tolist()]
    axes.plot(
        steps,
        drawn,
        color=ORANGE,
        linestyle="--",
        marker=None if facts.done > 1 else "o",
        linewidth=1.3,
        label="all rows sampled",
    )
    step_axis(axes, facts.done)
    axes.set_ylabel("mean return, centres")
    legend_above(axes)
    last = f"{mean[np.isfinite(mean)][-1]:+.2f}"
    return to_svg(figure, "returns", f"Mean return per step: {mean[np.isfinite(mean)][0]:+.2f} at first, {last} at last.")


def tokens(facts: RunFacts) -> str | None:
    if not facts.steps:
        return None
    prompt, cached, completion = (
        np.array(facts.series(f"rollout/{name}")) / 1000 for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    figure, (above, below) = new_plot(rows=2, high=3.6)
    stack(
        above, [("prompt, computed", BLUE, prompt - cached), ("prompt, cached", GREY, cached), ("completion", ORANGE, completion)]
    )
    above.set_ylabel("thousand tokens")
    legend_above(above)
    share = facts.series("rollout/prefix_hit_share")
    below.plot(range(1, facts.done + 1), share, color=GREY, marker=marker(facts.done), markersize=4)
    below.set_ylim(0, 1)
    share_axis(below)
    below.set_ylabel("prefix hits")
    step_axis(below, facts.done)
    return to_svg(
        figure, "tokens", f"Tokens per step; {np.nansum(cached) / max(np.nansum(prompt), 1e-9):.0%} of prompt tokens were cached."
    )


def times(facts: RunFacts) -> str | None:
    if not facts.steps:
        return None
    each = [stages_of(facts.steps.get(step, {})) for step in range(1, facts.done + 1)]
    parts = [(name, colour, np.array([stages[name] for stages in each])) for name, colour in _COLOURS.items()]
    figure, (axes,) = new_plot(high=3.2)
    stack(axes, parts)
    step_axis(axes, facts.done)
    axes.set_ylabel("seconds of wall time")
    legend_above(axes)
    whole = sum(float(values.sum()) for _, _, values in parts) or 1.0
    summary = ", ".join(f"{name} {values.sum() / whole:.0%}" for name, _, values in parts)
    return to_svg(figure, "times", f"Wall time of the steps by stage: {summary}.")


def lags(facts: RunFacts) -> str | None:
    """Share of each step's rows by policy lag; None if all are 0."""
    shares = {lag: np.nan_to_num(np.array(facts.series(f"train/policy_lag_{lag}_share"))) for lag, _ in _LAGS}
    if not any(shares[lag].any() for lag in ("1", "2", "more")):
        return None
    figure, (axes,) = new_plot()
    named = {"0": "its own", "1": "1 behind", "2": "2 behind", "more": "more"}
    stack(axes, [(named[lag], colour, shares[lag]) for lag, colour in _LAGS if shares[lag].any()])
    axes.set_ylim(0, 1)
    share_axis(axes)
    axes.set_ylabel("rows trained")
    step_axis(axes, facts.done)
    legend_above(axes)
    summary = ", ".join(f"{named[lag]} {values.mean():.0%}" for lag, values in shares.items())
    return to_svg(figure, "lags", f"Rows trained by policy lag, means over the steps: {summary}.")


def health(facts: RunFacts) -> list[tuple[str, str]]:
    if not facts.steps:
        return []
    return [
        (
            _lines(facts, "entropy", "nats", [("mean over the legal set", BLUE, facts.series("train/entropy"))]),
            "Entropy: how undecided the policy is among legal tokens. A fall to 0 in a few steps is a collapse.",
        ),
        (
            _lines(
                facts,
                "clipping",
                "share of tokens",
                [
                    ("low", BLUE, facts.series("train/clip_ratio_low")),
                    ("high", ORANGE, facts.series("train/clip_ratio_high")),
                    ("left out", GREY, facts.series("train/outlier_share")),
                ],
                per_cent=True,
            ),
            "Clip fractions: tokens whose ratio was clipped from below or above, and outliers left out of the loss.",
        ),
        (
            _lines(
                facts,
                "legal-mass",
                "share",
                [
                    ("median", GREEN, facts.series("train/legal_mass_p50")),
                    ("10th percentile", PURPLE, facts.series("train/legal_mass_p10")),
                ],
                per_cent=True,
            ),
            "Legal mass: probability of legal tokens without the mask. The loss does not train it; the mask enforces legality.",
        ),
        (
            _lines(facts, "gradient", "norm", [("largest of the step's updates", ORANGE, facts.series("train/grad_norm"))]),
            "Gradient norm before it is clipped to 1.",
        ),
    ]


def _lines(facts: RunFacts, name: str, unit: str, series: Series, *, per_cent: bool = False) -> str:
    figure, (axes,) = new_plot(high=2.5)
    for label, colour, values in series:
        axes.plot(range(1, facts.done + 1), values, color=colour, marker=marker(facts.done), markersize=3.5, label=label)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if per_cent:
        share_axis(axes)
    step_axis(axes, facts.done)
    axes.set_ylabel(unit)
    legend_above(axes)
    known = {label: [value for value in values if np.isfinite(value)] for label, _, values in series}
    summary = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}" for label, values in known.items() if values)
    return to_svg(figure, name, f"{name.replace('-', ' ')}: {summary}.")


# -- playing strength -------------------------------------------------------------------------------------------------------


def scores(records: Sequence[tuple[str, ScoreRecord]]) -> str | None:
    rows = [(name, r.score.estimate, _colour(r)) for name, r in records]
    summary = "; ".join(f"{name} {record.score.mean:+.2f}" for name, record in records)
    return dots(rows, "scores", "centres gained", f"Scores on held-out positions: {summary}.", "{:+.2f}", 0.0)


def ladder(points: Sequence[TrackPoint]) -> str | None:
    """Strength by policy version; None for fewer than three versions."""
    if len(points) < 3:
        return None
    figure, (axes,) = new_plot(high=3.2)
    band(axes, [point.version for point in points], [point.score for point in points], BLUE, "")
    whole_axis(axes, "policy version")
    axes.set_ylabel("centres gained")
    summary = "; ".join(f"version {point.version} {point.score.mean:+.2f}" for point in points)
    return to_svg(figure, "ladder", f"Strength by version against {points[0].opponents}: {summary}.")


def match(record: MatchRecord, number: int = 0) -> str | None:
    measure = record.settings.measure
    meaning, is_share, _ = MEASURES[measure]
    standings = sorted(record.table.players, key=lambda standing: -standing.measures[measure].mean)
    rows = [(s.player, s.measures[measure], BLUE if _is_version(s.player) else GREY) for s in standings]
    summary = "; ".join(f"{s.player} {s.measures[measure].mean:.3f}" for s in standings)
    par = PAR if is_share and measure in ("sos", "win") else None
    form = "{:.1%}" if is_share else "{:.2f}"
    return dots(rows, f"match-{number}", meaning, f"{record.table.games} games: {summary}.", form, par)


def match_by_year(record: MatchRecord, number: int = 0) -> str | None:
    players = [player for player in record.table.players if len(player.by_year) > 1]
    if not players:
        return None
    figure, (axes,) = new_plot(high=3.2)
    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, BROWN, GREY)
    for player, colour in zip(players, colours, strict=False):
        band(axes, range(1901, 1901 + len(player.by_year)), player.by_year, colour, player.player)
    axes.axhline(34 / 7, color=INK, alpha=0.35, linewidth=0.8)
    whole_axis(axes, "year")
    axes.set_ylabel("mean centres at its end")
    legend_above(axes)
    summary = "; ".join(f"{player.player} {player.by_year[-1].mean:.2f}" for player in players)
    return to_svg(figure, f"years-{number}", f"Centres by year, at last {summary}.")


def league(newest: LeagueStep | None) -> str | None:
    if newest is None:
        return None
    figure, (axes,) = new_plot(high=0.9 + 0.38 * len(newest.members))
    for place, member in enumerate(newest.members):
        axes.barh(place, member.win_share, height=0.6, color=BLUE)
        text = f"{member.games} forks, weight {member.weight:.2f}"
        axes.annotate(text, (member.win_share, place), (5, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(newest.members)), [f"v{member.version}" for member in newest.members])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.axvline(0.5, color=INK, alpha=0.35, linewidth=0.8)
    axes.set_xlim(0, 1.3)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlabel("win share of the policy")
    summary = "; ".join(f"v{member.version} {member.win_share:.2f}" for member in newest.members)
    return to_svg(figure, "league", f"Win shares of the policy against the league of step {newest.step}: {summary}.")


def dots(rows: Sequence[tuple[str, Estimate, str]], name: str, label: str, alt: str, form: str, line: float | None) -> str | None:
    if not rows:
        return None
    figure, (axes,) = new_plot(high=0.9 + 0.38 * len(rows))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.7)
    if line is not None:
        axes.axvline(line, color=INK, alpha=0.35, linewidth=0.8)
    for place, (_, estimate, colour) in enumerate(rows):
        if estimate.interval is not None:
            axes.hlines(place, *estimate.interval, color=colour, linewidth=3, alpha=0.45)
        axes.plot([estimate.mean], [place], "o", color=colour, markersize=7)
        text = form.format(estimate.mean)
        axes.annotate(text, (estimate.mean, place), (0, 6), textcoords="offset points", ha="center", color=INK)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.margins(x=0.09)
    axes.spines["left"].set_visible(False)
    bounded = any(estimate.interval is not None for _, estimate, _ in rows)
    axes.set_xlabel(f"{label}, {'with 95 % interval' if bounded else 'too few clusters for an interval'}")
    return to_svg(figure, name, alt)


def band(axes: Axes, places: Sequence[float], estimates: Sequence[Estimate], colour: str, name: str) -> None:
    """A line of means with dots, and a band where intervals exist."""
    low, high = np.array([each.interval or (np.nan, np.nan) for each in estimates]).T
    axes.plot(places, [each.mean for each in estimates], color=colour, marker="o", markersize=3.5, label=name)
    if len(places) > 1:
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    else:
        axes.vlines(places, low, high, color=colour, alpha=0.4, linewidth=3)


def _is_version(player: str) -> bool:
    return player.split(":")[-1] == "base" or player.split(":")[-1].lstrip("v").isdecimal()


def _colour(record: ScoreRecord) -> str:
    if record.player != "policy":
        return GREY
    return BLUE if record.policy_version else ORANGE


def write_curve(model: Path) -> None:
    durable_write(model / CURVE, stand_alone(imitation_plot(read_object(model / RECIPE)["curve"])).encode())


def imitation_plot(curve: Sequence[Mapping[str, Any]]) -> str:
    """Imitation's learning curve: losses, and the share of orders equal to the teacher's. `curve`: by ascending step."""
    steps = [point["step"] for point in curve]
    figure, (above, below) = new_plot(rows=2, high=4.2)
    for name, label, colour in (
        ("order_loss", "held out, per order token", BLUE),
        ("completion_loss", "held out, per completion token", ORANGE),
        ("loss", "trained on", GREY),
    ):
        known = [(point["step"], point[name]) for point in curve if point[name] is not None]
        if known:
            above.plot(*zip(*known, strict=True), color=colour, marker=marker(len(curve)), markersize=3.5, label=label)
    above.set_yscale("log")
    above.set_ylabel("nats a token")
    legend_above(above)
    below.plot(steps, [point["orders_equal"] for point in curve], color=GREEN, marker=marker(len(curve)), markersize=3.5)
    below.set_ylim(0, 1)
    share_axis(below)
    below.set_ylabel("orders equal")
    below.set_xlabel("step")
    last = curve[-1]
    result = f"{last['order_loss']:.2f} nats per order token and {last['orders_equal']:.0%} of orders equal"
    return to_svg(figure, "imitation", f"Imitation: after {last['step']} steps {result}.")
