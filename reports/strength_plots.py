"""Plots of playing strength: an SVG element, or None if there is nothing to draw."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from evaluation.intervals import Z95, Estimate
from evaluation.match_files import MatchRecord, PlayerRating
from evaluation.match_table import MEASURES, PAR
from evaluation.score_files import ScoreRecord
from evaluation.track import TrackPoint
from reports.drawing import BLUE, GREEN, GREY, INK, ORANGE, new_plot, share_axis, to_svg
from storage.league_files import LeagueStep


def scores(records: Sequence[tuple[str, ScoreRecord]]) -> str | None:
    """A dot and its interval for each (name, record), the first on top."""
    found = [(name, r.score.estimate, _colour(r)) for name, r in records]
    summary = "; ".join(f"{name} {record.score.mean:+.2f}" for name, record in records)
    return dots(found, "scores", "centres gained", f"Scores on held-out positions: {summary}.", "{:+.2f}", 0.0)


def ladder(points: Sequence[TrackPoint]) -> str | None:
    """Strength by policy version with intervals, and below it the share of tactical positions solved; None for one version."""
    tactical = [point for point in points if point.tactical is not None]
    if len(points) < 3 and len(tactical) < 2:
        return None
    figure, plots = new_plot(rows=2 if tactical else 1, high=4.2 if tactical else 3.2)
    _line(plots[0], [point.version for point in points], [point.score for point in points], BLUE)
    plots[0].set_ylabel("centres gained")
    if tactical:
        solved = [point.tactical for point in tactical if point.tactical is not None]
        _line(plots[1], [point.version for point in tactical], solved, GREEN)
        plots[1].set_ylim(0, 1)
        share_axis(plots[1])
        plots[1].set_ylabel("tactics solved")
    plots[-1].set_xlabel("policy version")
    plots[-1].xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    summary = "; ".join(f"version {point.version} {point.score.mean:+.2f}" for point in points)
    return to_svg(figure, "ladder", f"Strength by version against {points[0].opponents}: {summary}.")


def match(record: MatchRecord, number: int = 0) -> str | None:
    """The players of a match by its measure, best first, each with its interval."""
    measure = record.settings.measure
    meaning, is_share, _ = MEASURES[measure]
    standings = sorted(record.table.players, key=lambda standing: -standing.measures[measure].mean)
    found = [(s.player, s.measures[measure], BLUE if _is_version(s.player) else GREY) for s in standings]
    summary = "; ".join(f"{s.player} {s.measures[measure].mean:.3f}" for s in standings)
    par = PAR if is_share and measure in ("sos", "win") else None
    shown = "{:.1%}" if is_share else "{:.2f}"
    return dots(found, f"match-{number}", meaning, f"{record.table.games} games: {summary}.", shown, par)


def rated(ratings: Sequence[PlayerRating]) -> str | None:
    """The players of all matches of a run by rating, best first; None if fewer than two were rated."""
    if len(ratings) < 2:
        return None
    figure, (axes,) = new_plot(high=0.9 + 0.38 * len(ratings))
    for place, each in enumerate(ratings):
        colour = BLUE if _is_version(each.player) else GREY
        axes.barh(place, each.rating, height=0.6, color=colour, xerr=Z95 * each.rating_spread, ecolor=INK)
    _name_bars(axes, [each.player for each in ratings])
    axes.set_xlabel("rating, with 95 % interval of the rating model")
    summary = "; ".join(f"{each.player} {each.rating:.1f}" for each in ratings)
    return to_svg(figure, "rated", f"Ratings over all matches: {summary}.")


def league(found: LeagueStep | None) -> str | None:
    """The policy's win share against each member of the newest league; None if the run has none."""
    if found is None:
        return None
    figure, (axes,) = new_plot(high=0.9 + 0.38 * len(found.members))
    for place, member in enumerate(found.members):
        axes.barh(place, member.win_share, height=0.6, color=BLUE)
        text = f"{member.games} forks, weight {member.weight:.2f}"
        axes.annotate(text, (member.win_share, place), (5, 0), textcoords="offset points", va="center", color=INK)
    _name_bars(axes, [f"v{member.version}" for member in found.members])
    axes.axvline(0.5, color=INK, alpha=0.35, linewidth=0.8)
    axes.set_xlim(0, 1.3)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlabel("win share of the policy")
    summary = "; ".join(f"v{member.version} {member.win_share:.2f}" for member in found.members)
    return to_svg(figure, "league", f"Win shares of the policy against the league of step {found.step}: {summary}.")


def dots(
    rows: Sequence[tuple[str, Estimate, str]], name: str, label: str, alt: str, shown: str, line: float | None
) -> str | None:
    """A dot, its interval and its figure for each row, the first on top."""
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
        text = shown.format(estimate.mean)
        axes.annotate(text, (estimate.mean, place), (0, 6), textcoords="offset points", ha="center", color=INK)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.margins(x=0.09)
    axes.spines["left"].set_visible(False)
    bounded = any(estimate.interval is not None for _, estimate, _ in rows)
    axes.set_xlabel(f"{label}, {'with 95 % interval' if bounded else 'too few clusters for an interval'}")
    return to_svg(figure, name, alt)


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of horizontal bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _line(axes: Axes, versions: Sequence[int], estimates: Sequence[Estimate], colour: str) -> None:
    each = [(e.mean, *(e.interval or (np.nan, np.nan))) for e in estimates]
    low, high = [mean - low for mean, low, _ in each], [high - mean for mean, _, high in each]
    axes.errorbar(
        versions, [e.mean for e in estimates], yerr=[low, high], color=colour, marker="o", markersize=5, capsize=0, elinewidth=3,
        ecolor=(*_rgb(colour), 0.4),
    )  # fmt: skip


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _is_version(player: str) -> bool:
    return player.split(":")[-1] == "base" or player.split(":")[-1].lstrip("v").isdecimal()


def _colour(record: ScoreRecord) -> str:
    if record.player != "policy":
        return GREY
    return BLUE if record.policy_version else ORANGE
