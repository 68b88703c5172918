"""Makes the markdown and tables of Prefect's artifact pages from results. Boards are in the report."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from entente.evaluation.intervals import FEWEST_CLUSTERS, describe_shortage, format_count
from entente.evaluation.strength import Score
from state_cache.store import StateCache
from storage.runs import RunPaths

_STEP_COLUMNS = (
    ("return", "{0:+.2f}", "train/return_mean"),
    ("decisions", "{0:.0f}", "train/decisions"),
    ("lag", "{0:.0f}", "train/policy_lag_max"),
    ("tokens/s", "{0:.0f}", "rollout/tokens_per_s"),
    ("prefix hits", "{0:.0%}", "rollout/prefix_hit_share"),
    ("entropy", "{0:.2f}", "train/entropy"),
    ("step s", "{0:.2f}", "time/step_s"),
    ("rollout s", "{0:.2f}", "time/rollout_s"),
    ("waited s", "{0:.2f}", "time/rollout_wait_s"),
    ("train s", "{0:.2f}", "time/train_s"),
    ("publish s", "{0:.2f}", "time/publish_s"),
    ("Prefect", "{0:.1%}", "time/orchestration_share"),
    ("GPU", "{0:.0%}", "gpu/utilisation"),
)
_LEADS = ((4, "up to 4"), (5, "5"), (6, "6"), (8, "7 or 8"), (34, "9 and more"))
"""(largest number of centres, label) of the classes of the strongest power; all powers start with 3 or 4 centres."""


def step_row(step: int, figures: Mapping[str, float]) -> dict[str, str]:
    """A row of the table of steps. Missing metrics are empty."""
    row = {"step": str(step)}
    return row | {title: form.format(figures[name]) if name in figures else "" for title, form, name in _STEP_COLUMNS}


def cache_rows(cache: StateCache) -> list[dict[str, str | int]]:
    """Number of positions in both parts by game year and centres of the strongest power."""
    counts = {
        part: Counter((snapshot.year, _lead(max(snapshot.centres))) for snapshot in snapshots)
        for part, snapshots in (("to train from", cache.train), ("held out", cache.held_out))
    }
    met = sorted({key for counted in counts.values() for key in counted})
    return [
        {"year": year, "strongest power's centres": _LEADS[lead][1]}
        | {part: counted[year, lead] for part, counted in counts.items()}
        for year, lead in met
    ]


def result_page(paths: RunPaths, summary: Mapping[str, Any], scores: Mapping[str, Score]) -> str:
    """The result of a finished run as markdown."""
    base, trained = scores["base"], scores["trained"]
    report = paths.root / "report.html"
    parts = [
        f"# {paths.root.name}: {base.mean:+.2f} → {trained.mean:+.2f} centres",
        f"{_verdict(base, trained)} It took {summary['steps']} steps, {summary.get('decisions', 0)} decisions "
        f"and {summary.get('wall_s', 0):.0f} s; orders rejected: {summary.get('orders_rejected', 0)}; "
        f"policy lag at most {summary.get('max_policy_lag_seen', 0)}; "
        f"Prefect's share of the steps' time: {summary.get('orchestration_share', 0):.1%}.",
        _score_table({_in_words(label): score for label, score in scores.items()}),
        f"The report is `{report.resolve()}`." if report.exists() else f"The run is in `{paths.root.resolve()}`.",
    ]
    return "\n\n".join(parts)


def score_page(run: str, version: int, scores: Mapping[str, Score]) -> str:
    """Scores of one policy version, by opponents, as markdown."""
    who = "the base" if version == 0 else f"version {version}"
    first = next(iter(scores.values()))
    parts = [
        f"# {run}, {who}: {first.mean:+.2f} centres",
        f"Mean supply centres gained by one power, on "
        f"{format_count(first.positions, 'positions')} of {format_count(first.source_games, 'held-out games')}.",
        _score_table({f"against {opponents}": score for opponents, score in scores.items()}),
    ]
    return "\n\n".join(parts)


def _verdict(base: Score, trained: Score) -> str:
    ours, theirs = trained.estimate.interval, base.estimate.interval
    if ours is None or theirs is None:
        shortage = describe_shortage(min(base.source_games, trained.source_games), "source games")
        return f"**No difference from its base is shown**: there are no intervals ({shortage})."
    if ours[0] > theirs[1]:
        return "**It plays better than its base**: the two 95 % intervals do not overlap."
    if ours[1] < theirs[0]:
        return "**It plays worse than its base**: the two 95 % intervals do not overlap."
    return "**No difference from its base is shown**: the two 95 % intervals overlap."


def _in_words(label: str) -> str:
    """`trained_vs_mover` -> `trained, against mover`."""
    who, _, opponents = label.partition("_vs_")
    return f"{who}, against {opponents}" if opponents else who


def _score_table(scores: Mapping[str, Score]) -> str:
    rows = [
        f"| {who} | {score.mean:+.2f} | {_ends(score)} | {score.forks} | {score.source_games} |" for who, score in scores.items()
    ]
    return "\n".join(["| player | centres gained | 95 % interval | forks | source games |", "|---|---:|---:|---:|---:|", *rows])


def _ends(score: Score) -> str:
    found = score.estimate.interval
    return f"none: it takes {FEWEST_CLUSTERS} source games" if found is None else f"{found[0]:+.2f} to {found[1]:+.2f}"


def _lead(centres: int) -> int:
    return next(place for place, (most, _) in enumerate(_LEADS) if centres <= most)
