"""A run that is done can be asked, and measured again; and what cannot be asked for is refused in a sentence."""

import csv
import json
import re
import socket
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli.sql import sql
from storage.asking import QUERIES, VIEWS, ask, connect, ready_query
from tests.command import cells

BY_VERSION = "select policy_version, count(*), avg(centres_gained) from decisions group by all order by all"


def names(folder: Path) -> list[str]:
    """All files and folders under the runs' root."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "runs").rglob("*"))


def test_an_answer_is_a_table_with_a_head(workplace, trained):
    _, paths, _ = trained
    with connect(paths.root) as run:
        answer = run.sql(BY_VERSION).fetchall()
    done = workplace("sql", "--run", "first", BY_VERSION)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = cells(done.stdout)
    assert head == ["policy_version", "count_star()", "avg(centres_gained)"]
    assert rows == [[str(version), str(count), f"{gained:.4g}"] for version, count, gained in answer] and len(rows) == 2


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_that_the_help_names_is_there(trained, view: str):
    _, paths, _ = trained
    assert view in (sql.__doc__ or "")
    # Nothing is damaged, no worker has a URL, there is no GPU, the model does not think, nobody taught it or played it.
    may_be_empty = ("refused", "workers", "worker_log", "devices", "thoughts", "lessons", "played")
    with connect(paths.root) as run:
        assert (ask(run, f"select * from {view}").num_rows > 0) is (view not in may_be_empty)


@pytest.mark.parametrize("name", QUERIES)
def test_every_ready_question_has_an_answer_and_says_what_it_answers(trained, name: str):
    _, paths, _ = trained
    of_what_is_not_here = ("gpu_use", "worker_queue", "teacher_disagrees")  # tests/storage/test_asking.py has rows for these
    with connect(paths.root) as run:
        assert (ask(run, ready_query(name)).num_rows > 0) is (name not in of_what_is_not_here)
    assert re.match(r"-- \w.{20,120}\.\n", ready_query(name))


def test_tokens_are_those_of_the_rows_and_their_logprobs_add_up(trained):
    _, paths, _ = trained
    with connect(paths.root) as run:
        counts = ask(
            run, "select count(*) as n, sum(logprob) as s, count(*) filter (not forced) as free from tokens"
        ).to_pylist()[0]
        told = ask(run, "select sum(n_completion) as n, sum(n_branching) as free from decisions").to_pylist()[0]
        wrong = ask(run, "select count(*) as n from tokens where forced and logprob <> 0 or legal_tokens < 1").to_pylist()[0]
    assert (counts["n"], counts["free"], wrong["n"]) == (told["n"], told["free"], 0) and counts["s"] < 0


@pytest.mark.parametrize(
    "question",
    [
        "delete from decisions",
        "create table mine as from decisions",
        "attach 'x.db'",
        "copy decisions to 'x.csv'",
        "select 1; select 2",
        "set lock_configuration = false",
        "",
    ],
)
def test_what_would_change_anything_is_refused(workplace, trained, question: str):
    before = names(workplace.folder)
    done = workplace("sql", "--run", "first", question)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "entente: ask one question with SELECT: a run cannot be changed here\n"
    assert names(workplace.folder) == before


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (
            "select * from rows",
            "SQL failed: Catalog Error: Table with name rows does not exist!; the views are decisions",
        ),
        ("select * from read_csv('/etc/passwd')", "SQL failed: Permission Error: "),
        ("selekt", "SQL failed: Parser Error: "),
        ("@nothing", "there is no ready question 'nothing'; known: duplicate_completions, "),
    ],
)
def test_a_question_that_fails_says_why_and_what_there_is(workplace, trained, question: str, sentence: str):
    done = workplace("sql", "--run", "first", question)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"entente: {sentence}")


def test_answers_come_as_csv_json_and_parquet_too(workplace, trained, tmp_path: Path):
    question = "select d.decision_id, power, orders from decisions as d join orders using (decision_id) order by 1 limit 3"
    with connect(trained[1].root) as run:
        rows = ask(run, question).to_pylist()
    as_json = workplace("sql", "--run", "first", question, "--format", "json")
    assert [json.loads(line) for line in as_json.stdout.splitlines()] == rows
    as_csv = list(csv.DictReader(workplace("sql", "--run", "first", question, "--format", "csv").stdout.splitlines()))
    assert [(row["power"], json.loads(row["orders"])) for row in as_csv] == [(row["power"], row["orders"]) for row in rows]
    file = tmp_path / "answer.parquet"
    assert workplace("sql", "--run", "first", question, "--format", "parquet", "--output", str(file)).returncode == 0
    assert pq.read_table(file).to_pylist() == rows
    refused = workplace("sql", "--run", "first", question, "--format", "parquet")
    assert refused.returncode == 2 and "--output" in refused.stderr


@pytest.mark.system
def test_a_version_measured_again_scores_the_same(workplace, trained):
    summary, _, _ = trained
    done = workplace.process("evaluate", "--run", "first", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["run"], result["policy_version"], result["orders_rejected"]) == ("first", 2, 0)
    assert {name: (score["score"], score["ci"], score["forks"]) for name, score in result["against"].items()} == {
        "random": (summary["trained_score"], summary["trained_ci"], 4),
        "mover": (summary["trained_score_vs_mover"], summary["trained_ci_vs_mover"], 4),
    }
    assert f"policy version 2 against random: {summary['trained_score']:+.2f} centres" in done.stdout


def test_a_version_that_was_never_published_is_refused(workplace, trained):
    before = names(workplace.folder)
    done = workplace("evaluate", "--run", "first", "--version", "9")
    assert done.returncode == 2
    assert done.stderr == "entente: run 'first' has no policy version 9; its newest is 2\n"
    assert names(workplace.folder) == before


@pytest.mark.system
def test_a_worker_that_does_not_answer_is_named_and_the_run_s_name_stays_free(workplace, trained):
    before = names(workplace.folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = workplace.process("train", "--config", "small.toml", "--run", "remote", "--inference.urls", url)
    assert done.returncode == 2
    said, refusal = done.stderr.splitlines()
    assert said == "starting the engine and the trainer"
    assert refusal.startswith(f"entente: worker {url} is not ready: nobody listens there")
    noted = "runs/_flow_runs/"  # who worked at what, for recovery; old ones go
    left = [name for name in names(workplace.folder) if not name.startswith(noted)]
    assert left == [name for name in before if not name.startswith(noted)]
