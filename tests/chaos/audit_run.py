"""The audit of a finished run: nothing was trained twice or lost, whatever happened to the processes that made it.

Reads the files with DuckDB and Arrow alone, without any of the code that wrote them.
"""

import json
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.ipc

from storage.runs import RunPaths

_TOLD = [
    "decision_id",
    "start_group",
    "fork",
    "phase_index",
    "power",
    "phase",
    "policy_version",
    "status",
    "checksum",
    "centres_gained",
]
"""Columns of a row that the audit asks for."""


def ledgers(paths: RunPaths) -> pa.Table:
    """All ledgers, with the step as a column."""
    files = sorted(paths.ledger.glob("step-*.arrow"))
    tables = [pyarrow.ipc.open_file(file).read_all().replace_schema_metadata(None) for file in files]
    steps = [pa.array([_step(file)] * table.num_rows, pa.int64()) for file, table in zip(files, tables, strict=True)]
    return pa.concat_tables([table.append_column("step", step) for table, step in zip(tables, steps, strict=True)])


def decisions(paths: RunPaths) -> pa.Table:
    """All rows of all shards, with what the audit asks for."""
    tables = []
    for file in sorted(paths.shards.rglob("*.arrow")):
        if not file.name.startswith(".") and not file.name.endswith(".phases.arrow"):
            table = pyarrow.ipc.open_file(file).read_all().select(_TOLD).replace_schema_metadata(None)
            table = table.set_column(_TOLD.index("power"), "power", table["power"].cast(pa.string()))
            tables.append(table.append_column("shard", pa.array([f"{file.parent.name}/{file.name}"] * table.num_rows)))
    return pa.concat_tables(tables)


def audit(paths: RunPaths, steps: int, max_lag: int = 0) -> None:
    """Hold the run's files to the invariants of a run of `steps` steps.

    Args:
        max_lag: versions that a trained row may be behind.

    Raises:
        AssertionError: one does not hold; says which.
    """
    recorded = sorted(_step(file) for file in paths.ledger.glob("step-*.arrow"))
    assert recorded == list(range(1, steps + 1)), "step numbers run on without a gap"
    published = {int(path.name[1:]) for path in paths.adapters.glob("v*")}
    assert published <= set(recorded) and published >= set(recorded[-20:]), "old ones may go"
    lines = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert lines == list(range(steps + 2)), "the probe, each step once, the scores"
    with duckdb.connect() as sql:
        used, played = ledgers(paths), decisions(paths)
        sql.register("used", used)
        sql.register("played", played)
        twice = "select decision_id from {} group by all having count(*) > 1"
        assert sql.sql(twice.format("used")).fetchall() == [], "no decision is trained on in two steps"
        assert sql.sql(twice.format("played")).fetchall() == [], "no decision is played twice"
        ((unfounded,),) = sql.execute("""
            select count(*) from used left join played
            using (decision_id, shard, policy_version, checksum) where played.decision_id is null
        """).fetchall()
        assert unfounded == 0, "what a ledger names lies in its shard, unchanged"
        ((too_old,),) = sql.execute(
            f"select count(*) from used where step - 1 - policy_version not between 0 and {max_lag}"
        ).fetchall()
        assert too_old == 0, "no row is older than the staleness budget"
        # Each published row is used, or its whole group is not, for a reason that the row's facts give.
        sql.execute(f"""
            create temp table standing as
            with valued as (
                select *, sum(centres_gained) over (
                    partition by shard, start_group, fork, power
                    order by phase_index rows between current row and unbounded following
                ) as outcome
                from played
            )
            select v.shard, v.start_group, v.power, v.phase, count(*) as n, count(used.decision_id) as n_used,
                case when count(*) < 2 then 'alone' when not bool_and(v.status = 'complete') then 'failed'
                     when max(v.outcome) - min(v.outcome) <= 1e-6 then 'no return_range'
                     when {steps} - min(v.policy_version) > {max_lag} then 'expired' else 'eligible' end as reason
            from valued as v left join used using (decision_id) group by v.shard, v.start_group, v.power, v.phase
        """)
        in_part = sql.sql("select * from standing where n_used not in (0, n)").fetchall()
        assert in_part == [], "groups are used whole"
        wrong = sql.sql("select * from standing where n_used > 0 and reason in ('alone', 'failed', 'no return_range')").fetchall()
        assert wrong == [], "what teaches nothing is not trained on"
        if max_lag == 0:
            left = sql.sql("select * from standing where n_used = 0 and reason in ('expired', 'eligible')").fetchall()
            assert left == [], "in a run without lag, what could be trained on was"


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))
