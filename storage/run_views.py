"""Makes a run's query views: rows, tokens, phases, ledgers and metrics. Token lists stay in the mapped shards until a query reads
them. `storage/run_sql.py` connects and queries."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from duckdb.func import ARROW, SPECIAL

from storage.arrow_files import DECISION_SCHEMA
from storage.index import Index
from storage.ledger import last_step
from storage.runs import RunPaths

VIEWS = {
    "decisions": "a decision, with its return under the run's reward weights; key `decision_id`, also `shard`, `row`",
    "groups": "an advantage group of `decisions`; key `shard`, `start_group`, `power`, `phase`",
    "batches": "a row of a step's ledger: which decision the step trained on, and how old it was; key `step`, `place`",
    "phases": "a phase of a fork; its key `shard`, `start_group`, `fork`, `phase_index` is also in `decisions`. Boards, and the "
    "orders of all powers, are in the Arrow files alone",
    "orders": "the order set of a decision; key `decision_id`",
    "tokens": "a completion position of a decision; key `decision_id`, `place`",
    "lag": "a number of decisions that a step trained on at one policy lag",
    "snapshots": "a position that forks started from; key `snapshot_id`",
    "group_eligibility": "an advantage group, and whether the next step could train on it; keys as of `groups`",
    "candidates": "a start group that the next step could train on; key `shard`, `start_group`",
    "metrics": "a figure of a step; key `step`, `name`. Step 0 has the comparison of trainer and engine before training, the "
    "step after the last the final scores",
    "devices": "a reading of a GPU; of a long run the newest 32 to 64 MiB, which eight GPUs write in 9 to 18 hours",
    "rejected_files": "a shard or damaged line that is left out of all views",
    "thoughts": "the thought of a decision, where the model thinks; key `decision_id`",
}
"""View -> what a row is."""
COLUMNS = {
    "shard": "File below `shards/`.",
    "producer": "Who played it: `local`, the run's rollouts; `probe`, single forks that compare engine and trainer where no "
    "rollout is of the newest version.",
    "row": "Place in the shard, from 0.",
    "n_prompt": "Prompt tokens.",
    "n_completion": "Completion tokens.",
    "n_branching": "Completion tokens with more than one legal choice: those that are trained on.",
    "return": "Weighted sum of the components of this decision and the power's later ones in the fork.",
    "n": "Decisions in the group.",
    "return_range": "Largest minus smallest return; 0: nothing to learn.",
    "oldest_version": "Oldest policy version that sampled one of its rows.",
    "newest_version": "Newest policy version that sampled one of its rows.",
    "usable": "At least two decisions, all complete, none rejected, all returns numbers.",
    "used": "Ledgers that name it.",
    "step": "Training step; the first is 1.",
    "place": "Position: in `batches` of the row in its step, in `tokens` of the token in its completion.",
    "policy_lag": "Trained version minus the version that sampled the row.",
    "advantage_group": "Number of the row's advantage group within its step.",
    "token": "Token id.",
    "text": "Text of the token or thought; null without the run's tokenizer.",
    "logprob": "Nats, after mask and temperature; of a thought the sum over its tokens.",
    "legal_tokens": "Size of the legal set.",
    "forced": "One token was legal.",
    "thought": "The token belongs to a thought.",
    "tokens": "Number of thought tokens.",
    "truncated": "The budget ended the thought.",
    "decisions": "Number of decisions.",
    "start_groups": "Number of start groups.",
    "forks": "Number of forks.",
    "mean_return": "Mean return of the decisions.",
    "mean_return_range": "Mean return range of the usable advantage groups; null without any.",
    "group_lag": "Trained version minus the oldest version of the group.",
    "has_range": "Its returns differ by more than rounding.",
    "eligibility": "`eligible`, or the first rule it breaks: `used`, `unusable`, `ahead`, `expired`, `zero_std`.",
    "lag": "Versions from the oldest row to the trainer's.",
    "advantage_groups": "Eligible advantage groups.",
    "uniform": "Number between 0 and 1 from seed, step and start group, for sampling.",
    "name": "Name of the metric (`entente/telemetry/metrics.py`) or reading.",
    "value": "Its value.",
    "time": "Seconds since 1970.",
    "device": "GPU.",
    "reason": "Why the decision failed, or the file is left out.",
}
"""Column -> its meaning, where it is not that of a decision's column (`entente/records/rows.py`)."""
_VIEWS_SQL = Path(__file__).with_name("views.sql").read_text()
_LISTS = ("decision_id", "input_ids", "prompt_len", "behaviour_logprobs", "legal_ids", "legal_offsets", "orders")
TokenText = Callable[[int], str | None]
"""Text of a token id, for the column "text" of `tokens`; called only if a query reads that column."""
ReadThought = Callable[[list[int]], tuple[str, bool] | None]
"""Text of a thought's tokens and whether its end was forced, for the view `thoughts`; called likewise."""
_THOUGHT = "STRUCT(text VARCHAR, truncated BOOLEAN)"
_THOUGHT_ARROW = pa.struct([("text", pa.string()), ("truncated", pa.bool_())])


def make_views(index: Index, paths: RunPaths, token_text: TokenText, read_thought: ReadThought) -> None:
    """Create the views beside the tables of an index with `keep_rows`."""
    connection = index.connection
    newest = last_step(paths)
    index.judge(newest + 1, policy_version=newest)
    tables = [index.rows[name].replace_schema_metadata(None) for name in sorted(index.rows)]
    readings = (paths.devices.with_suffix(f".before{paths.devices.suffix}"), paths.devices)  # a long file was renamed
    for name, rows in {
        "payload": _stacked(tables, _LISTS),
        "metrics": _long(index, paths.metrics, {"step": pa.int32()}),
        "devices": pa.concat_tables(_long(index, file, {"time": pa.float64(), "device": pa.string()}) for file in readings),
    }.items():
        connection.register(name, rows)
    connection.create_function("token_text", _texts(token_text), ["INTEGER"], "VARCHAR", type=ARROW, null_handling=SPECIAL)
    connection.create_function(
        "read_thought", _thoughts(read_thought), ["INTEGER[]"], _THOUGHT, type=ARROW, null_handling=SPECIAL
    )
    connection.execute("CREATE VIEW orders AS SELECT decision_id, orders FROM payload")
    connection.execute(_VIEWS_SQL)


def _texts(text_of: TokenText) -> Callable[[pa.Array], pa.Array]:
    """A function from a column of token ids to their texts; looks each id up once."""
    known: dict[int | None, str | None] = {None: None}

    def texts(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
        one = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        encoded = one.dictionary_encode()
        for token in encoded.dictionary.to_pylist():
            if token not in known:
                known[token] = text_of(token)
        return pa.array([known[token] for token in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)

    return texts


def _thoughts(read: ReadThought) -> Callable[[pa.Array | pa.ChunkedArray], pa.Array]:
    def thoughts(tokens: pa.Array | pa.ChunkedArray) -> pa.Array:
        values = [read(ids) for ids in tokens.to_pylist()]
        return pa.array([one and {"text": one[0], "truncated": one[1]} for one in values], _THOUGHT_ARROW)

    return thoughts


def _stacked(tables: list[pa.Table], columns: tuple[str, ...]) -> pa.Table:
    wanted = pa.schema([DECISION_SCHEMA.field(name) for name in columns])
    return pa.concat_tables([table.select(columns) for table in tables]) if tables else wanted.empty_table()


def _long(index: Index, file: Path, keys: Mapping[str, pa.DataType]) -> pa.Table:
    """JSON lines as rows: the values of `keys`, then name and value of each number."""
    rows = [
        [*place, name, float(value)]
        for place, figures in _lines(index, file, list(keys))
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * (len(keys) + 2)
    types = {**keys, "name": pa.string(), "value": pa.float64()}
    return pa.table({name: pa.array(column, kind) for (name, kind), column in zip(types.items(), columns, strict=True)})


def _lines(index: Index, file: Path, keys: list[str]) -> list[tuple[list[Any], dict[str, Any]]]:
    """For each JSON line: the values of `keys`, and the other entries. Damaged lines are left out and counted in a row of
    `rejected_files`; a last line without an end may still be being written."""
    lines, damaged = [], 0
    for line in file.read_text(errors="replace").splitlines(keepends=True) if file.is_file() else ():
        try:
            figures = json.loads(line)
            lines.append(([figures.pop(key) for key in keys], figures))
        except (ValueError, KeyError, AttributeError, TypeError):
            damaged += line.endswith("\n")
    if damaged:
        index.connection.execute(
            "INSERT INTO rejected_files VALUES (?, ?)", [file.name, f"{damaged} lines of {file} cannot be read"]
        )
    return lines
