"""Claims about questions: every type can leave in every form, a question can be ended, and a wrong name brings the right one."""

import csv
import io
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow.csv
import pytest

from entente.decoding.open_set import open_set
from entente.rollouts.figures import rollout_figures
from entente.telemetry.devices import append_line
from entente.telemetry.errors import InputError
from storage.index import Index
from storage.ledger import write_ledger
from storage.run_sql import QUERIES, THREAD, Form, ask, connect, json_lines, ready_query, run_interruptible
from storage.runs import RunPaths
from storage.shards import Coverage, publish_shard
from tests.storage.make_rows import make_decision, make_phase

ODD = {
    "blob": (r"'ab\xAA'::blob", r"ab\xAA", r"ab\xAA"),
    "variant": ("{'a': 1}::variant", "{'a': 1}", {"a": 1}),
    "interval": ("interval '1 month 2 days'", "1 month 2 days", "1 month 2 days"),
    "union": ("union_value(n := 3)", "3", {"n": 3}),
    "infinite timestamp": ("'infinity'::timestamp", "infinity", "infinity"),
    "date before Christ": ("'0044-03-15 (BC)'::date", "0044-03-15 (BC)", "0044-03-15 (BC)"),
    "far date": ("'290000-01-01'::date", "290000-01-01", "290000-01-01"),
    "large number": ("170141183460469231731687303715884105727::hugeint",) + ("170141183460469231731687303715884105727",) * 2,
}


@pytest.fixture
def run(paths: RunPaths, publish: Callable[..., Any]):
    publish(range(1))
    with connect(paths.root, token_text=lambda token: f"<{token}>" if token % 2 else None) as connection:
        yield connection


@pytest.mark.parametrize("name", ODD)
def test_every_type_leaves_in_every_form(run: duckdb.DuckDBPyConnection, name: str):
    sql, text, value = ODD[name]
    question = f"select {sql} as odd"
    assert ask(run, question, "table").to_pylist() == [{"odd": text}]
    (line,) = json_lines(ask(run, question, "json"))
    found = json.loads(line)["odd"]
    assert (str(found) if name == "large number" else found) == value
    sink = io.BytesIO()
    pyarrow.csv.write_csv(ask(run, question, "csv"), sink)
    (written,) = csv.DictReader(io.StringIO(sink.getvalue().decode()))
    assert written["odd"] == text


def test_parquet_has_no_number_with_another_sign_no_time_without_its_zone_and_no_bytes_for_text(run: duckdb.DuckDBPyConnection):
    odd = {
        "md5_number('x')": "221188521546444818284084528980898927773",
        "'12:30:00+02'::timetz": "12:30:00+02",
        "'101'::bit": "101",
        "'170141183460469231731687303715884105728'::bignum": "170141183460469231731687303715884105728",
        "{'a': 1}::variant": "{'a': 1}",
        "[md5_number('x')]": "[221188521546444818284084528980898927773]",
        "{'at': ['12:30:00+02'::timetz]}": "{'at': ['12:30:00+02']}",
    }
    (row,) = ask(run, f"select {', '.join(odd)}", "parquet").to_pylist()
    assert list(row.values()) == list(odd.values())
    (row,) = ask(run, "select sum(1) as a, [1] as b, array_value(1, 2) as c", "parquet").to_pylist()
    assert row == {"a": 1, "b": [1], "c": [1, 2]}, "other numbers stay numbers"


@pytest.mark.parametrize("form", ["table", "csv", "parquet"])
def test_columns_of_one_name_keep_their_own_values(run: duckdb.DuckDBPyConnection, form: Form):
    answer = ask(run, "select 1 as a, 2 as a, 3 as a_1", form)
    assert [str(column[0].as_py()) for column in answer.columns] == ["1", "2", "3"]
    assert answer.column_names == (["a", "a", "a_1"] if form == "table" else ["a", "a_1", "a_1_1"])
    (line,) = json_lines(ask(run, "select 1 as a, 2 as a, 3 as a_1", "json"))
    assert json.loads(line) == {"a": 1, "a_1": 2, "a_1_1": 3}


def test_json_has_the_whole_row_whatever_its_columns_are_named(run: duckdb.DuckDBPyConnection):
    (line,) = json_lines(ask(run, "select 5 as answer, 6 as b", "json"))
    assert json.loads(line) == {"answer": 5, "b": 6}


def test_json_has_no_number_that_is_none_and_no_control_character(run: duckdb.DuckDBPyConnection):
    question = "select 'nan'::double as a, ['inf'::float] as b, 'NaN' || chr(27) || chr(155) || chr(127) as c"
    (line,) = json_lines(ask(run, question, "json"))
    assert json.loads(line, parse_constant=pytest.fail) == {"a": None, "b": [None], "c": "NaN\x1b\x9b\x7f"}
    assert line.isprintable()


@pytest.mark.parametrize(
    ("question", "near"),
    [
        ("select step from batchs", '"batches"'),
        ("select powr from decisions", '"power"'),
        ("select d.polcy_version from decisions as d", '"policy_version"'),
        ("select avgg(1)", '"avg"'),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(run: duckdb.DuckDBPyConnection, question: str, near: str):
    with pytest.raises(InputError, match=f"; did you mean {near}\\?; the views are decisions, "):
        ask(run, question)


@pytest.mark.parametrize("form", ["arrow", "table", "parquet"])
@pytest.mark.parametrize(
    "question",
    [
        "WITH gone AS (DELETE FROM decisions RETURNING row) FROM gone",
        "EXPLAIN ANALYZE DELETE FROM decisions",
        "EXPLAIN (ANALYZE) DROP TABLE batches",
        "EXPLAIN ANALYZE SET VARIABLE step = 9",
    ],
)
def test_no_question_changes_what_the_next_one_reads(run: duckdb.DuckDBPyConnection, question: str, form: Form):
    state = "SELECT count(*), getvariable('step'), (SELECT count(*) FROM batches) FROM decisions"
    before = run.sql(state).fetchall()
    with pytest.raises(InputError, match=r"cannot be changed here|read-only mode"):
        ask(run, question, form)
    assert run.sql(state).fetchall() == before and before[0][0]
    assert ask(run, "EXPLAIN ANALYZE FROM decisions", form).num_rows


def test_tokens_have_their_text_which_is_looked_up_once_and_only_where_it_is_asked(paths: RunPaths, publish: Callable[..., Any]):
    publish(range(1))
    looked: list[int] = []
    with connect(paths.root, token_text=lambda token: looked.append(token) or (f"<{token}>" if token % 2 else None)) as run:
        ask(run, "select sum(token), count(*) from tokens")
        assert looked == []
        rows = ask(run, "from tokens").to_pylist()
    assert rows and all(row["text"] == (f"<{row['token']}>" if row["token"] % 2 else None) for row in rows)
    assert sorted(looked) == sorted({row["token"] for row in rows})


def test_a_thought_token_may_be_nearly_any_id_and_thoughts_are_counted(paths: RunPaths, publish: Callable[..., Any]):
    """A thought of two tokens below 600, then a forced token and a choice of two; a row without a thought has 0 tokens."""
    sets = {
        "legal_ids": [*open_set([5], 600).tolist(), *open_set([5, 7], 600).tolist(), 9, 3, 4],
        "legal_offsets": [0, 2, 5, 6, 8],
    }
    thinking = {"input_ids": [1, 1, 8, 599, 9, 4], "prompt_len": 2, "behaviour_logprobs": [-6.0, -5.5, 0.0, -0.5]} | sets
    rows = [make_decision(random.Random(0), fork=0, **thinking), make_decision(random.Random(1), fork=1)]
    publish_shard(paths, "p0", 0, rows, [make_phase(fork=fork) for fork in (0, 1)], {}, next_start_group=1)
    with connect(paths.root) as run:
        thoughts = {row.pop("decision_id"): row for row in ask(run, "from thoughts").to_pylist()}
        tokens = ask(run, "from tokens order by place").to_pylist()
        counted = ask(run, "select decision_id, n_branching from decisions where fork = 0").to_pylist()
    own = [row for row in tokens if row["decision_id"] == rows[0].decision_id]
    assert [(row["legal_tokens"], row["forced"], row["thought"]) for row in own] == [
        (599, False, True), (598, False, True), (1, True, False), (2, False, False),
    ]  # fmt: skip
    assert thoughts == {rows[0].decision_id: {"tokens": 2, "logprob": -11.5, "text": None, "truncated": None}}
    assert counted == [{"decision_id": rows[0].decision_id, "n_branching": 3}]


def test_an_answer_and_a_query_are_bounded_in_memory(
    paths: RunPaths, publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    publish(range(1))
    monkeypatch.chdir(paths.root)
    with connect(paths.root, memory_gib=0.1) as run:
        with pytest.raises(InputError, match=r"takes more than 0.01 GiB, after .* rows"):
            ask(run, "from range(1000000000)", memory_gib=0.01)
        with pytest.raises(InputError, match=r"Out of Memory Error: .*; ask for less, or raise --memory-gib"):
            ask(run, "select range from range(100000000) order by hash(range)")
        assert ask(run, "from range(1000000000)", first=5).num_rows < 100_000
    assert not (paths.root / ".tmp").exists()


ENDLESS = "select count(*) from range(10000000000000)"


def test_a_question_that_takes_too_long_is_ended():
    with duckdb.connect() as run, pytest.raises(InputError, match="too long"):
        run_interruptible(run, lambda run: ask(run, ENDLESS), seconds=0.3, late="too long")
    assert not any(thread.name.startswith(THREAD) for thread in threading.enumerate())


def test_what_is_asked_in_time_is_answered_and_what_fails_fails():
    with duckdb.connect() as run:
        assert run_interruptible(run, lambda run: run.sql("select 7").fetchall(), seconds=60, late="") == [(7,)]
        with pytest.raises(duckdb.ParserException):
            run_interruptible(run, lambda run: run.sql("selec"), seconds=60, late="")


def test_ready_questions_are_answered_at_each_step_of_a_run(paths: RunPaths, publish: Callable[..., Any]):
    """In the end each of them has rows."""
    index = Index(paths)
    for step in range(1, 6):
        publish(range(step - 1, step), "local", forks=4, policy_version=max(0, step - 2))
        index.refresh()
        chosen, _ = index.select_batch(step, policy_version=step - 1, start_groups=2)
        assert write_ledger(paths, step, chosen, {})
        figures = {"step": step, "time/step_s": 4.0, "time/trainer_wait_s": 1.0, "rollout/tokens_per_s": 9.0}
        with paths.metrics.open("a") as file:
            file.write(json.dumps(figures | {"train/legal_mass_p50": 0.5, "train/legal_mass_p10": 0.1}) + "\n")
        with paths.devices.open("a") as file:
            file.write(json.dumps({"time": 60.0 * step, "device": "0", "utilisation": 0.5}) + "\n")
        with connect(paths.root) as run:
            answers = {name: ask(run, ready_query(name)) for name in QUERIES}
        assert {row["idle_share"] for row in answers["trainer_idle_share"].to_pylist()} == {0.25}
        assert {row["utilisation"] for row in answers["gpu_use"].to_pylist()} == {0.5}
        assert {row["rollout/tokens_per_s"] for row in answers["tokens_per_second"].to_pylist()} == {9}
        assert set(answers["return_by_version_and_power"]["policy_version"].to_pylist()) == set(range(max(1, step - 1)))
    lags = answers["lag_histogram"].to_pylist()
    assert abs(sum(row["share"] for row in lags) - 1) < 1e-9 and {row["policy_lag"] for row in lags} <= {0, 1, 2}
    assert [name for name, answer in answers.items() if answer.num_rows == 0] == []


def test_times_that_a_vllm_server_does_not_report_are_absent_and_never_zero(paths: RunPaths, publish: Callable[..., Any]):
    shard, _ = publish(range(1), "local", queue_ms=0.0, prefill_ms=0.0)
    with connect(paths.root) as run:
        (row,) = ask(run, ready_query("rollout_latency")).slice(length=1).to_pylist()
    assert (row["queue_p50"], row["queue_p99"], row["prefill_p50"], row["decode_p50"]) == (None, None, None, 16.0)
    figures = rollout_figures(Coverage(published=(shard,), missing=(), set_aside=()), 1)
    assert {name for name in figures if name.endswith("_ms")} == {"decode_ms", "engine_ms"}


def test_readings_of_gpus_are_rows_also_from_the_file_that_was_too_long(paths: RunPaths):
    for minute in (1, 2):
        line = json.dumps({"time": 60.0 * minute, "device": "0", "utilisation": 0.5})
        append_line(paths.devices, line, largest=0)
    with connect(paths.root) as run:
        assert ask(run, "select time from devices order by time")["time"].to_pylist() == [60.0, 120.0]


def test_probes_change_no_answer_about_the_policy_s_play(paths: RunPaths, publish: Callable[..., Any]):
    names = ("order_entropy", "duplicate_completions", "return_by_version_and_power", "reward_components")

    def answers() -> list[list[dict[str, Any]]]:
        with connect(paths.root) as run:
            found = [ask(run, ready_query(name)).to_pylist() for name in (*names, "most_informative_positions")]
        return [*found[:-1], [{"range": row["mean_return_range"]} for row in found[-1]]]

    publish(range(1), "local")
    before = answers()
    publish(range(1), "probe", forks=1)
    publish(range(1, 2), "probe", forks=2, snapshot_id=f"{0:016x}", status="failed", centres_gained=90.0)
    assert answers() == before and all(before)
