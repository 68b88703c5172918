"""A run that is done can be asked, and measured again; and what cannot be asked for is refused in a sentence."""

import json
import socket
from pathlib import Path

import pytest

from storage.index import connect

pytestmark = pytest.mark.vllm

BY_VERSION = "select policy_version, count(*), avg(centres_gained) from decisions group by all order by all"


def names(folder: Path) -> list[str]:
    """All files and folders under the runs' root."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "runs").rglob("*"))


def cells(printed: str) -> list[list[str]]:
    """The rows of a printed table."""
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in printed.splitlines()
        if line[0] in "┃│"
    ]


def test_an_answer_is_a_table_with_a_head(workplace, trained):
    _, paths, _ = trained
    with connect(paths.root) as run:
        answer = run.sql(BY_VERSION).fetchall()
    done = workplace("sql", "--run", "first", BY_VERSION)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = cells(done.stdout)
    assert head == ["policy_version", "count_star()", "avg(centres_gained)"]
    assert rows == [[str(version), str(count), f"{gained:.4g}"] for version, count, gained in answer] and len(rows) == 2


@pytest.mark.parametrize("view", ["decisions", "groups", "batches", "plies", "refused"])
def test_every_view_that_the_help_names_is_there(workplace, trained, view: str):
    done = workplace("sql", "--run", "first", f"select count(*) as n from {view}")
    assert done.returncode == 0, done.stderr
    assert (int(cells(done.stdout)[1][0]) > 0) is (view != "refused")


def test_nothing_that_a_question_does_outlives_it(workplace, trained):
    summary, before = trained[0], names(workplace.folder)
    assert workplace("sql", "--run", "first", "delete from decisions").returncode == 0
    asked_again = workplace("sql", "--run", "first", "select count(*) from decisions")
    assert cells(asked_again.stdout)[1] == [str(summary["decisions"])]
    assert names(workplace.folder) == before


def test_a_version_measured_again_scores_the_same(workplace, trained):
    summary, _, _ = trained
    done = workplace("evaluate", "--run", "first", "--json")
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


def test_a_worker_that_does_not_answer_is_named_and_the_run_s_name_stays_free(workplace, trained):
    before = names(workplace.folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = workplace("train", "--config", "small.toml", "--run", "remote", "--inference.urls", url)
    assert done.returncode == 2
    said, refusal = done.stderr.splitlines()
    assert said == "starting the engine and the trainer"
    assert refusal.startswith(f"entente: worker {url} is not ready: nobody listens there")
    assert names(workplace.folder) == before
