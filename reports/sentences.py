"""Describes a run in sentences. Pure functions of its facts; figures are compared before they are rounded."""

from collections.abc import Sequence

from evaluation.intervals import describe_shortage, format_count, format_interval
from evaluation.score_files import ScoreRecord
from evaluation.track import TrackPoint
from reports.explain import explain_run
from reports.read_run import RunFacts

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def state(facts: RunFacts) -> tuple[str, str]:
    """One word for the run's state (complete, running, cut, empty) and the sentence that says so."""
    done, planned = facts.done, facts.planned
    if facts.summary is not None and done >= planned:
        wall = f" in {duration(facts.summary['wall_s'])}" if "wall_s" in facts.summary else ""
        return "complete", f"Complete: {_steps(planned)}{wall}."
    last = f"the last file was written {duration(facts.quiet_s)} ago"
    if facts.at_work:
        where = f"{done} of {_steps(planned)} done" if done else f"no step of {planned} done yet"
        return "running", f"Running: {where}; {last}."
    if not done and not facts.begun_step:
        return "empty", f"Stopped before the first of {_steps(planned)}; {last}."
    if done >= planned:
        return "cut", f"All {_steps(planned)} are done, but the run stopped before its last scores; {last}."
    if facts.begun_step > done:
        return "cut", f"Cut at step {facts.begun_step} of {planned}: its batch was chosen, {_steps(done)} done; {last}."
    return "cut", f"Cut after step {done} of {planned}; {last}."


def simulated(facts: RunFacts) -> str:
    """A note that rollouts were simulated, if they were; else empty."""
    source = facts.settings.get("simulated", {}).get("from_run", "")
    return (
        f"Its rollouts are simulated: start groups of run '{source}' were replayed, nothing was played, learned or scored."
        if source
        else ""
    )


def verdict(scores: dict[str, ScoreRecord]) -> str:
    """Base and trained score with intervals, compared with scripted players."""
    base, trained = scores.get("base"), scores.get("trained")
    words = {"random": "a random player gains", "teacher": "the imitated teacher"}
    scripted = [label for label, record in scores.items() if label == "teacher" or label == record.player]
    beside = " and ".join(
        f"{words.get(label, f'the scripted player {label}')} {_gain(scores[label])}"
        for label in sorted(scripted, key=lambda label: label != "random")
    )
    if base is None and trained is None:
        return "Nothing has been scored yet."
    known = trained or base
    assert known is not None
    years = known.settings.horizon_years
    unit = f"supply centres in {'a game year' if years == 1 else f'{years} game years'}"
    held_out = (
        f"{format_count(known.score.positions, 'held-out positions')} of {format_count(known.score.source_games, 'source games')}"
    )
    where = f"from {held_out} against {known.opponents} opponents"
    if base is None or trained is None:
        who = "The trained policy" if base is None else "The base"
        rest = "the base was not scored" if base is None else "the trained policy has not been scored"
        said = f"{who} gains {_with_interval(known)} {unit} {where}; {rest}.{_missing(known)}"
        return said + (f" Beside it, {beside}." if beside else "")
    return (
        f"The trained policy gains {_with_interval(trained)} {unit} {where}; the base gained {_with_interval(base)}."
        + (f" Beside them, {beside}." if beside else "")
        + f" {_difference(base, trained)}"
    )


def _difference(base: ScoreRecord, trained: ScoreRecord) -> str:
    ours, theirs = trained.score.estimate.interval, base.score.estimate.interval
    if ours is None or theirs is None:
        return f"These positions alone do not tell the two apart.{_missing(trained)}"
    if ours[0] > theirs[1]:
        return "The intervals do not overlap: training helped."
    if ours[1] < theirs[0]:
        return "The intervals do not overlap: training did harm."
    return "The intervals overlap: these positions alone do not tell the two apart."


def _missing(record: ScoreRecord) -> str:
    """A note that a score has no interval and what one takes; '' if it has one."""
    if record.score.estimate.interval is not None:
        return ""
    return f" There is no interval: {describe_shortage(record.score.source_games, 'source games')}."


def mismatch(facts: RunFacts) -> str:
    """The mismatch of trainer and engine before the first step, and its limit."""
    found, training = facts.mismatch, facts.settings.get("training", {})
    if not found:
        return "Trainer and engine have not been compared yet."
    over = f"over {found['mismatch/tokens']:.0f} tokens"
    half = "bfloat16" in (training.get("dtype"), facts.settings.get("inference", {}).get("dtype"))
    if half:
        return (
            f"At the start trainer and engine differed by {_small(found['mismatch/mean'])} nats in the mean (limit "
            f"{training['mismatch_mean_bf16']:g}) and {_small(found['mismatch/p99'])} at the 99th percentile (limit "
            f"{training['mismatch_p99_bf16']:g}), {over}."
        )
    limit = f"the limit is {_small(training['mismatch_max'])}" if "mismatch_max" in training else "without a limit"
    return f"At the start trainer and engine differed by at most {_small(found['mismatch/largest'])} nats {over}; {limit}."


def hidden_rollouts(facts: RunFacts) -> str:
    """The share of rollouts that ran while the trainer trained; '' if none did."""
    waited = sum(
        max(
            0.0,
            figures["time/step_s"] - sum(figures.get(f"time/{part}_s", 0.0) for part in ("train", "publish", "orchestration")),
        )
        for figures in facts.steps.values()
    )
    hidden = facts.total("time/rollout_s") - waited
    if hidden < 0.01 * facts.total("time/step_s"):
        return ""
    return f" Another {duration(hidden)} of rollouts ran behind training and are not drawn."


def limits(facts: RunFacts) -> list[str]:
    """What limits the run and which setting changes it, as in `entente runs explain`."""
    return explain_run(facts.steps, facts.settings).sentences if facts.steps else []


def lag(facts: RunFacts) -> str:
    """The policy lags of the trained rows."""
    rows = sum(facts.rows.lags.values())
    own, budget = facts.rows.lags.get(0, 0), facts.settings.get("storage", {}).get("max_policy_lag", "?")
    return f"{own / max(1, rows):.0%} of the rows were trained by the version that drew them; the budget is {budget}."


def queue(facts: RunFacts) -> str:
    """What the queue and its controller did over the whole run."""
    counted = {
        "advantage groups became too old untrained": facts.total("queue/expired"),
        "rollout tasks failed for good": facts.total("queue/failed"),
        "took so long that others were begun in their place": facts.total("queue/passed_over"),
        "were given up because their rows would be too old": facts.total("queue/cancelled"),
    }
    said = [f"{count:,.0f} {what}" for what, count in counted.items() if count]
    return ("In all, " + ", ".join(said) + ".") if said else "Nothing became too old, failed or was given up."


def ladder(points: Sequence[TrackPoint]) -> str:
    """The newest version compared with the first that was measured."""
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    newest, oldest = last.score.interval, first.score.interval
    if newest is None or oldest is None:
        said = f"There are no intervals: {describe_shortage(min(first.score.clusters, last.score.clusters), 'source games')}."
    else:
        between = "lie apart" if newest[0] > oldest[1] or newest[1] < oldest[0] else "overlap"
        said = f"Intervals of version {first.version} and version {last.version} {between}."
    if first.tactical is not None and last.tactical is not None:
        said += f" Tactical positions solved: {first.tactical.mean:.0%} at first, {last.tactical.mean:.0%} at last."
    return said


def _small(value: float) -> str:
    """Two digits, with a power of ten for values below 0.001."""
    if value == 0 or value >= 0.001:
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')} × 10{str(int(exponent)).translate(_RAISED)}"


def duration(seconds: float) -> str:
    """A duration in words."""
    for size, one, many in ((86400, "day", "days"), (3600, "hour", "hours"), (60, "minute", "minutes")):
        if seconds >= 1.5 * size:
            count = round(seconds / size)
            return f"{count} {one if count == 1 else many}"
    return f"{seconds:.0f} s"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _gain(record: ScoreRecord) -> str:
    return f"{record.score.mean:+.2f}"


def _with_interval(record: ScoreRecord) -> str:
    found = record.score.estimate.interval
    return f"{record.score.mean:+.2f}" + ("" if found is None else f" {format_interval(found, '+.2f')}")
