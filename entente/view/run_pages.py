"""What the pages of a step, a group, a decision, a game and of SQL show, as values for their templates."""

import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from entente.reports import plots
from entente.reports.explain import explain_step
from entente.reports.inspect_rows import Decided, Facts, Inspector
from entente.reports.page import data_url
from entente.reports.run_facts import RunFacts, edited_rewards
from entente.reports.run_text import connect_run
from entente.reports.write_page import Link
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.metrics import METRICS
from storage.adapters import published_versions
from storage.ledger import read_ledger
from storage.run_sql import ask, left_out, ready_query, run_interruptible
from storage.runs import RunPaths, checkpoint_steps

ROWS, SECONDS, MEMORY_GIB = 1000, 60, 2.0
"""Limits of a query from the page: at most those of `entente sql`."""
OVERLAYS = {
    "probability": "probability of the sampled token over its legal set; darker: less probable",
    "legal": "number of legal tokens; darker: more",
    "advantage": "advantage times how undecided the token was (1 - probability); darker: a stronger push, of either sign",
    "entropy": "entropy over the legal set, nats; darker: less decided (recomputed)",
    "gap": "log-probability of the trainer minus the engine's, nats; darker: further apart (recomputed)",
    "fate": "double line: clipped or left out of the loss (recomputed)",
}
RECOMPUTED = ("entropy", "gap", "fate")


# -- a step -----------------------------------------------------------------------------------------------------------------


def step_page(facts: RunFacts, paths: RunPaths, step: int, link: Link) -> dict[str, Any]:
    ledger = read_ledger(paths, step)
    if ledger is None and step not in facts.steps:
        raise InputError(f"run '{facts.name}' has no step {step}: its newest is {max(facts.begun_step, facts.done)}")
    figures = facts.steps.get(step, {})
    explained = explain_step(facts.steps, step, facts.settings) if figures else None
    rows = [] if ledger is None else ledger.to_pylist()
    groups = []
    rows.sort(key=lambda row: row["advantage_group"])
    for _, each in itertools.groupby(rows, key=lambda row: row["advantage_group"]):
        members = list(each)
        returns, first = [row["return"] for row in members], members[0]
        where = {name: first[name] for name in ("shard", "start_group", "power", "phase")}
        groups.append(
            where
            | {
                "address": link("group", facts.name, **where),
                "forks": len(members),
                "low": min(returns),
                "high": max(returns),
                "lag": max(row["policy_lag"] for row in members),
            }
        )
    groups.sort(key=lambda group: group["low"] - group["high"])
    return {
        "step": step,
        "done": bool(figures),
        "explained": explained,
        "shares": {name: explained.share(name) for name in explained.parts} if explained else {},
        "groups": groups,
        "figures": [
            (name, f"{value:,.5g}", METRICS[name].unit, METRICS[name].meaning)
            for name, value in sorted(figures.items())
            if name in METRICS
        ],
        "before": link("step", facts.name, step=step - 1) if step > 1 else "",
        "after": link("step", facts.name, step=step + 1) if step < max(facts.begun_step, facts.done) else "",
    }


# -- a group ----------------------------------------------------------------------------------------------------------------


def group_page(rows: Inspector, run: str, where: Mapping[str, Any], link: Link) -> dict[str, Any]:
    group = rows.group(where["start_group"], where["power"] or None, where["phase"] or None, where["shard"])
    decided = {each.facts["fork"]: each for each in rows.siblings(group.facts)}
    best, worst = ({order for order, _ in each.orders} for each in (group.best, group.worst))
    forks = []
    for member in group.members:
        each, course = decided[member["fork"]], rows.course(member)
        other = worst if member["decision_id"] == group.best.facts["decision_id"] else best
        forks.append(
            {
                "facts": member,
                "name": f"{member['start_group']}/{member['fork']}",
                "orders": [(order, probability, order not in other, each.result(order)) for order, probability in each.orders],
                "parts": {name: value for name, value in each.components.items() if value},
                "course": [(phase, len(centres)) for phase, centres in course],
                "decision": link("decision", run, id=member["decision_id"], shard=member["shard"]),
                "game": link(
                    "game", run, game=f"{member['producer']}/{member['start_group']}/{member['fork']}", shard=member["shard"]
                ),
            }
        )
    return {
        "group": group.facts,
        "forks": forks,
        "why": why_it_won(rows, group.best, group.worst),
        "pictures": [
            (name, data_url(each.picture()), _alt(each))
            for name, each in (("best", group.best), ("worst", group.worst))
            if each.board
        ],
        "sql": link("sql", run, query=_group_query(group.facts)),
    }


def _group_query(facts: Facts) -> str:
    def text(name: str) -> str:
        return "'" + facts[name].replace("'", "''") + "'"

    return (
        'select fork, status, "return", policy_version, orders from decisions join orders using (decision_id) '
        f"where shard = {text('shard')} and start_group = {facts['start_group']} and power = {text('power')} "
        f'and phase = {text("phase")} order by "return" desc'
    )


def why_it_won(rows: Inspector, best: Decided, worst: Decided) -> list[str]:
    """Where the forks with the highest and the lowest return part, and where their centres do."""
    if best.facts["return"] == worst.facts["return"]:
        return ["All forks have the same return, so the group teaches nothing."]
    names = [f"fork {each.facts['fork']}" for each in (best, worst)]
    said = [f"{names[0].capitalize()} returned {best.facts['return'] - worst.facts['return']:.3g} more than {names[1]}."]
    if (parting := rows.parting(best.facts, worst.facts)) is None:
        said.append("The power gave the same orders in both: what the others ordered made the difference.")
    else:
        phase, ours, theirs = parting
        said.append(
            f"They part in {phase}: {names[0]} ordered {', '.join(ours) or 'nothing else'}; "
            f"{names[1]} ordered {', '.join(theirs) or 'nothing else'}."
        )
    if tuple(best.facts[name] for name in ("ended", "status")) != tuple(worst.facts[name] for name in ("ended", "status")):
        said.append(f"{names[0].capitalize()} ended: {best.facts['ended']}; {names[1]}: {worst.facts['ended']}.")
    if (differing := _first_difference(rows.course(best.facts), rows.course(worst.facts))) is not None:
        phase, more, less = differing
        gained = [f"{names[0]} has {', '.join(more)}"] * bool(more) + [f"{names[1]} has {', '.join(less)}"] * bool(less)
        said.append(f"Their centres first differ in {phase}: {'; '.join(gained)}.")
    elif "won" in (best.facts["ended"], worst.facts["ended"]):  # the board after the last phase is not recorded then
        said.append("Their centres do not differ before the phase in which a game was won.")
    else:
        said.append("Their centres never differ; the return comes from other components.")
    return said


_Course = Sequence[tuple[str, Sequence[str]]]


def _first_difference(ours: _Course, theirs: _Course) -> tuple[str, list[str], list[str]] | None:
    """The first phase in which the centres differ after equally many counts, and what each has alone. A fork may have retreats or
    adjustments that the other lacks, so their positions do not correspond by number."""

    def count(phase: str) -> int:
        return int(phase[1:-1]) + phase.startswith("W")

    counted = {count(phase): set(centres) for phase, centres in theirs}
    for phase, centres in ours:
        own, other = set(centres), counted.get(count(phase))
        if other is not None and own != other:
            return phase, sorted(own - other), sorted(other - own)
    return None


def _alt(decided: Decided) -> str:
    orders = ", ".join(
        f"{order} {probability:.0%}" if probability is not None else order for order, probability in decided.orders
    )
    return f"Board of {decided.facts['phase']} with the orders of {decided.facts['power'].title()}: {orders}"


# -- a decision -------------------------------------------------------------------------------------------------------------


def decision_page(
    rows: Inspector, run: str, decision: int, shard: str, overlay: str, recomputed: Mapping[str, list[Any]] | None, link: Link
) -> dict[str, Any]:
    found = rows.decision(decision, shard)
    facts = found.facts
    where = {"id": decision, "shard": facts["shard"]}
    columns = {name: dict(zip(recomputed["place"], recomputed[name], strict=True)) for name in RECOMPUTED} if recomputed else {}
    tokens = []
    for place, token in enumerate(found.sampled):
        values = {"probability": math.exp(token.logprob), "legal": token.legal, "advantage": found.advantage}
        values |= {name: columns.get(name, {}).get(place) for name in RECOMPUTED}
        tokens.append(
            {
                "place": place,
                "text": token.token,
                "quoted": repr(token.token),
                "forced": token.legal == 1,
                "logprob": token.logprob,
                **values,
            }
        )
    for token, heat in zip(tokens, _heats(tokens, overlay), strict=True):
        token["heat"] = heat
    return {
        "decision": found,
        "facts": facts,
        "picture_uri": data_url(found.picture()) if found.board else "",
        "alt": _alt(found),
        "tokens": tokens,
        "link": link("decision", run, **where, overlay=overlay),
        "overlay": overlay,
        "meaning": OVERLAYS[overlay],
        "overlays": [(name, link("decision", run, **where, overlay=name), name in RECOMPUTED) for name in OVERLAYS],
        "recomputed": columns,
        "group": link(
            "group", run, shard=facts["shard"], start_group=facts["start_group"], power=facts["power"], phase=facts["phase"]
        ),
        "game": link("game", run, game=f"{facts['producer']}/{facts['start_group']}/{facts['fork']}", shard=facts["shard"]),
        "steps": [(step, lag, link("step", run, step=step)) for step, lag in found.used],
        "sql": link("sql", run, query=f"from tokens where decision_id = {decision} order by place"),
        "row_sql": link("sql", run, query=f"from decisions where decision_id = {decision}"),
    }


def _heats(tokens: Sequence[Mapping[str, Any]], overlay: str) -> Iterator[int]:
    """0 to 9 for each token; 0 for one without a choice."""
    values = []
    for token in tokens:
        value, chosen = token.get(overlay), not token["forced"]
        if overlay == "probability":
            value = 1 - token["probability"]
        elif overlay == "advantage":
            value = None if value is None else abs(value) * (1 - token["probability"])
        elif overlay == "fate":
            value = None if value is None else float(value != "trained")
        values.append(abs(float(value)) if value is not None and chosen else 0.0)
    most = 1.0 if overlay in ("probability", "fate") else max(values, default=0.0)
    return (round(9 * value / most) if most else 0 for value in values)


def weights_for(paths: RunPaths, decided: Decided) -> tuple[int, Path | None, str]:
    """The version to recompute a decision under, its folder (None: the base), and what the gap then means."""
    sampled = decided.facts["policy_version"]
    trained = decided.used[0][0] - 1 if decided.used else sampled
    stored = {0: None} | {step: paths.checkpoint(step) for step in checkpoint_steps(paths)}
    stored |= {version: paths.adapter(version) for version in published_versions(paths)}
    version = next((each for each in (trained, sampled) if each in stored), None)
    if version is None:
        version = min(stored, key=lambda each: (abs(each - trained), each))
    if version == sampled:
        said = f"Recomputed under version {version}, which sampled it: the gap is that of trainer and engine."
    elif version == trained:
        said = f"Recomputed under version {version}, which was trained on it; version {sampled} sampled it: the gap has both."
    else:
        said = f"Version {trained} is gone: recomputed under version {version}, so the gap has what training changed too."
    return version, stored[version], said


# -- SQL --------------------------------------------------------------------------------------------------------------------


class SqlOfRun:
    """One connection to a run's rows, as new as its files. For one thread at a time."""

    def __init__(self, settings: RunSettings, paths: RunPaths) -> None:
        self._connection, self._text = connect_run(settings, paths.root, MEMORY_GIB)
        self._reward_weights = settings.storage.reward_weights
        edited_rewards(self._reward_weights)  # remembers what is loaded

    def close(self) -> None:
        self._connection.close()

    def lacking(self) -> str:
        return "; ".join(filter(None, (left_out(self._connection), self._text.missing, edited_rewards(self._reward_weights))))

    def ask(self, query: str, *, parquet: bool) -> pa.Table:
        query = ready_query(query[1:]) if query.startswith("@") else query
        first = None if parquet else ROWS + 1
        late = f"the query exceeded {SECONDS:g} seconds: select less, or use entente sql, which waits longer"
        return run_interruptible(
            self._connection,
            lambda connection: ask(connection, query, "parquet", first=first, memory_gib=MEMORY_GIB),
            seconds=SECONDS,
            late=late,
        )


def parquet_of(answer: pa.Table, lacking: str) -> bytes:
    """`lacking`: what the answer lacks, in words, which the file's metadata keep."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(answer.replace_schema_metadata({"lacking": lacking} if lacking else None), sink)
    return sink.getvalue()


def sql_result(answer: pa.Table) -> dict[str, Any]:
    shown = answer.slice(length=ROWS)
    columns = [
        ["" if value is None else f"{value:.5g}" if isinstance(value, float) else value for value in column.to_pylist()]
        for column in shown.columns
    ]
    rows = list(zip(*columns, strict=True))
    return {
        "names": answer.column_names,
        "rows": rows,
        "more": answer.num_rows > ROWS,
        "most": ROWS,
        "picture": plots.of_table(shown),
    }
