"""A run that is done can be asked, and measured again; and what cannot be asked for is refused in a sentence."""

import json
import re

import pytest

from entente.cli.sql import sql
from storage.run_sql import QUERIES, ask, connect, ready_query
from storage.run_views import VIEWS


def test_every_view_that_the_help_names_and_every_ready_question_has_rows(trained):
    # Nothing is damaged, there is no GPU, the model does not think, nobody played it.
    may_be_empty = ("rejected_files", "devices", "thoughts", "played")
    of_what_is_not_here = ("gpu_use",)  # tests/storage/test_run_sql.py has rows for these
    assert len(VIEWS) > 8 and len(QUERIES) > 8
    with connect(trained[1].root) as run:
        for view in VIEWS:
            assert view in (sql.__doc__ or "")
            rows = ask(run, f"select * from {view}").num_rows
            if view != "candidates":  # what a next step could take: the last one may have used all
                assert (rows > 0) is (view not in may_be_empty), view
        for name in QUERIES:
            assert (ask(run, ready_query(name)).num_rows > 0) is (name not in of_what_is_not_here), name
            assert re.match(r"-- \w.{20,120}\.\n", ready_query(name))


@pytest.mark.in_turn
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
