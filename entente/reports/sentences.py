"""Sentences about a run, match, comparison or what-if. They claim a difference only where its interval excludes 0."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entente.evaluation.intervals import clusters_to_show, describe_shortage, format_count, format_interval
from entente.evaluation.match_files import MatchRecord
from entente.evaluation.match_table import cluster_noun, conclusions
from entente.evaluation.score_files import ScoreRecord, TrackPoint, measured_by
from entente.evaluation.what_if import OrderSets, WhatIf
from entente.reports.compared import Compared, Paired
from entente.reports.read_run import RecordedRun
from entente.reports.run_facts import RunFacts
from entente.reports.write_page import root_flag
from entente.telemetry.alerts import MISMATCH_MAX, MISMATCH_MEAN

HEADLINE = "trained"
"""Label of the score that decides which run is stronger."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def state(facts: RunFacts) -> tuple[str, str]:
    """One word (complete, running, cut, empty) and a sentence."""
    done, planned = facts.done, facts.planned
    all_steps, done_steps = (format_count(count, "steps") for count in (planned, done))
    if facts.summary is not None and done >= planned:
        wall = f" in {duration(facts.summary['wall_s'])}" if "wall_s" in facts.summary else ""
        return "complete", f"Complete: {all_steps}{wall}."
    last = f"the last file was written {duration(facts.quiet_s)} ago"
    if facts.at_work:
        where = f"{done} of {all_steps} done" if done else f"no step of {planned} done yet"
        return "running", f"Running: {where}; {last}."
    if not done and not facts.begun_step:
        return "empty", f"Stopped before the first of {all_steps}; {last}."
    if done >= planned:
        return "cut", f"All {all_steps} are done, but the run stopped before its last scores; {last}."
    if facts.begun_step > done:
        return "cut", f"Cut at step {facts.begun_step} of {planned}: its batch was chosen, {done_steps} done; {last}."
    return "cut", f"Cut after step {done} of {planned}; {last}."


def verdict(scores: Mapping[str, ScoreRecord]) -> str:
    base, trained = scores.get("base"), scores.get("trained")
    if base is None and trained is None:
        return "Nothing has been scored yet."
    known = trained or base
    assert known is not None
    words = {"random": "a random player gains", "teacher": "the imitated teacher"}
    scripted = [
        label
        for label, record in scores.items()
        if (label == "teacher" or label == record.player) and measured_by(record) == measured_by(known)
    ]
    others = " and ".join(
        f"{words.get(label, f'the scripted player {label}')} {_gain(scores[label])}"
        for label in sorted(scripted, key=lambda label: label != "random")
    )
    years = known.settings.horizon_years
    unit = f"supply centres in {'a game year' if years == 1 else f'{years} game years'}"
    held_out = (
        f"{format_count(known.score.positions, 'held-out positions')} of {format_count(known.score.source_games, 'source games')}"
    )
    where = f"from {held_out} against {known.opponents} opponents"
    comparison = f" For comparison, {others}." if others else ""
    if base is None or trained is None:
        who = "The trained policy" if base is None else "The base"
        rest = "the base was not scored" if base is None else "the trained policy has not been scored"
        return f"{who} gains {_with_interval(known)} {unit} {where}; {rest}.{_missing(known)}{comparison}"
    gain = f"The trained policy, version {trained.policy_version}, gains {_with_interval(trained)} {unit} {where}"
    if measured_by(base) != measured_by(trained):
        rest = "the base has since been scored by another program or with other settings, so the two are not compared"
        return f"{gain}; {rest}.{_missing(trained)}{comparison}"
    return f"{gain}; the base gained {_with_interval(base)}.{comparison} {_difference(base, trained)}"


def refreshed_positions(settings: Mapping[str, Any]) -> str:
    cache = settings.get("cache", {})
    if not cache.get("from_run"):
        return ""
    return (
        f"Up to {cache['on_policy_share']:.0%} of the training positions come from a refresh of the state cache: run "
        f"{cache['from_run']} reached them in its first {cache['from_groups']} start groups. Scores use the same held-out "
        "positions as without a refresh."
    )


def _difference(base: ScoreRecord, trained: ScoreRecord) -> str:
    ours, theirs = trained.score.estimate.interval, base.score.estimate.interval
    if ours is None or theirs is None:
        return f"These positions alone do not separate the two.{_missing(trained)}"
    if ours[0] > theirs[1]:
        return "The intervals do not overlap: training helped."
    if ours[1] < theirs[0]:
        return "The intervals do not overlap: training hurt."
    return "The intervals overlap: these positions alone do not separate the two."


def _missing(record: ScoreRecord) -> str:
    if record.score.estimate.interval is not None:
        return ""
    return f" There is no interval: {describe_shortage(record.score.source_games, 'source games')}."


def mismatch(facts: RecordedRun) -> str:
    figures = facts.mismatch
    if not figures:
        return "Trainer and engine have not been compared yet."
    over, rounded = f"over {figures['mismatch/tokens']:.0f} tokens", figures.get("mismatch/rounded")
    kind = "mean" if rounded else "largest"
    later = [each[f"mismatch/{kind}"] for each in facts.steps.values() if f"mismatch/{kind}" in each]
    since = ""
    if later:
        most = math.nan if any(map(math.isnan, later)) else max(later)
        since = f" In {format_count(len(later), 'later comparisons')} the {kind} difference was at most {_small(most)}."
    if rounded:
        return (
            f"At the start trainer and engine differed by {_small(figures['mismatch/mean'])} nats in the mean (limit "
            f"{MISMATCH_MEAN:g}) and {_small(figures['mismatch/p99'])} at the 99th percentile, {over}.{since}"
        )
    limit = f"the limit is {_small(MISMATCH_MAX)}"
    return (
        f"At the start trainer and engine differed by at most {_small(figures['mismatch/largest'])} nats {over}; {limit}.{since}"
    )


def lag(facts: RecordedRun) -> str:
    steps = [figures for figures in facts.steps.values() if "train/policy_lag_0_share" in figures]
    if not (rows := sum(figures.get("train/decisions", 0.0) for figures in steps)):
        return "No row has been trained on yet, so there is no policy lag."
    own = sum(figures["train/policy_lag_0_share"] * figures.get("train/decisions", 0.0) for figures in steps)
    budget = facts.settings.get("storage", {}).get("max_policy_lag", "?")
    return f"{own / rows:.0%} of the rows were trained by the version that sampled them; the staleness budget is {budget}."


def ladder(track: Sequence[TrackPoint]) -> str:
    points = [point for point in track if point.comparable]
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    newest, oldest = last.score.interval, first.score.interval
    if newest is None or oldest is None:
        return f"There are no intervals: {describe_shortage(min(first.score.clusters, last.score.clusters), 'source games')}."
    between = "lie apart" if newest[0] > oldest[1] or newest[1] < oldest[0] else "overlap"
    return f"Intervals of version {first.version} and version {last.version} {between}."


def not_drawn(track: Sequence[TrackPoint]) -> str:
    versions = ", ".join(f"v{point.version}" for point in track if not point.comparable)
    return f"Not drawn, because another program or other settings measured them: {versions}." if versions else ""


# -- a match ----------------------------------------------------------------------------------------------------------------


def describe_match(record: MatchRecord) -> str:
    table, clusters = record.table, f"{cluster_noun(record.settings)}, {record.table.clusters} in all"
    head = f"{table.games} games, {record.settings.description}; intervals resample whole {clusters}"
    return " ".join(f"{sentence}." for sentence in (head, *conclusions(table, record.settings)))


# -- runs side by side ------------------------------------------------------------------------------------------------------


def verdicts(compared: Compared) -> list[str]:
    first = compared.runs[0]
    headline = {pair.other: pair for pair in compared.paired if pair.label == HEADLINE}
    return [
        paired(headline[run.name], first.name) if run.name in headline else _unscored(first, run) for run in compared.runs[1:]
    ]


def paired(pair: Paired, first: str) -> str:
    ours, theirs = (f"{name} (version {version})" for name, version in zip((first, pair.other), pair.versions, strict=True))
    if isinstance(pair.comparison, str):
        return f"The scores '{pair.label}' of {first} and {pair.other} cannot be paired: {pair.comparison}."
    difference, starts = pair.comparison.difference, f"the same {pair.comparison.forks:,} starts against {pair.opponents}"
    interval = difference.interval
    if interval is None:
        why = describe_shortage(difference.clusters, "source games")
        return f"From {starts}, {theirs} and {ours} are {difference.mean:+.2f} centres apart, without an interval: {why}."
    if interval == (0, 0):
        return f"{theirs} and {ours} gain as much from {starts}, on the average of every source game."
    bounds = f"95 % interval {format_interval(interval, '+.2f')} over {difference.clusters} source games"
    if difference.excludes_zero:
        more = "more" if difference.mean > 0 else "fewer"
        return f"{theirs} gains {abs(difference.mean):.2f} centres {more} than {ours} from {starts}, {bounds}."
    need = pair.comparison.forks_to_show
    enough = f"; about {need:,} starts would show a difference of {difference.mean:+.2f}" if need else ""
    return f"{theirs} and {ours} do not differ significantly from {starts}: {bounds} contains 0{enough}."


def next_commands(compared: Compared, runs_root: Path) -> list[tuple[str, str]]:
    first, root = compared.runs[0].name, root_flag(runs_root)
    commands = []
    for pair in compared.paired:
        if pair.label == HEADLINE and isinstance(pair.comparison, str):
            match = f"--players newest,{first}:newest --start held-out --opponents {pair.opponents} --years {pair.years}"
            commands.append(
                (
                    f"Measure {pair.other} and {first} from the same positions",
                    f"entente evaluate --run {pair.other} {match} --measure gained{root}",
                )
            )
    return commands


def _unscored(first: RunFacts, other: RunFacts) -> str:
    lacking = [run.name for run in (first, other) if HEADLINE not in run.scores]
    return (
        f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no score of a last version yet, so none is compared."
    )


# -- a what-if question -----------------------------------------------------------------------------------------------------


def describe_change(answer: WhatIf, changed: OrderSets | None, version: str) -> str:
    """What differs. `changed`: None if a player gave the orders, or nobody; `version`: that player, or empty."""
    phase = answer.position.board.phase
    if version:
        return f"{answer.power.title()} in {phase} by {version}"
    parts = []
    for power, orders in (changed or {}).items():
        given, played = Counter(orders), Counter(answer.position.orders.get(power, ()))  # a set may waive several builds
        new, old = (list(more.elements()) for more in (given - played, played - given))
        if new:
            parts.append(f"{power.title()} in {phase}: {', '.join(new)} instead of {', '.join(old) or 'nothing'}")
    return "; ".join(parts) or f"{answer.power.title()} in {phase} as it was played"


def what_if_verdict(answer: WhatIf) -> str:
    who, years = answer.power.title(), f"{answer.how.years} year{'s' if answer.how.years > 1 else ''}"
    difference, pairs = answer.difference, f"{len(answer.pairs)} pairs of forks with the same random numbers"
    interval = difference.describe("+.2f", "pairs")
    if set(answer.spread) == {0}:
        return f"Nothing changes for {who}: after {years} it has as many centres in both forks of each of {pairs}."
    if difference.excludes_zero:
        more = "more" if difference.mean > 0 else "fewer"
        gained = f"{who} has {abs(difference.mean):.2f} centres {more} after {years} than with the orders that were played"
        return f"{gained} ({interval}; {pairs})."
    needed = clusters_to_show([pair.difference(answer.power) for pair in answer.pairs])
    hint = f" A difference of this size takes about {needed} pairs." if needed and needed > len(answer.pairs) else ""
    return f"No difference is shown for {who} after {years}: {difference.mean:+.2f} centres ({interval}; {pairs}).{hint}"


# -- words ------------------------------------------------------------------------------------------------------------------


def _small(value: float) -> str:
    if value == 0 or not value < 0.001:  # also not a number
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')} × 10{str(int(exponent)).translate(_RAISED)}"


def duration(seconds: float) -> str:
    for size, units in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return format_count(round(seconds / size), units)
    return f"{seconds:.0f} s"


def _gain(record: ScoreRecord) -> str:
    return f"{record.score.mean:+.2f}"


def _with_interval(record: ScoreRecord) -> str:
    interval = record.score.estimate.interval
    return f"{record.score.mean:+.2f}" + ("" if interval is None else f" {format_interval(interval, '+.2f')}")
