"""What a model wrote before its orders is shown by every command that shows decisions, and cannot act on a terminal or a page."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from storage.runs import RunPaths
from tests.command import Entente
from tests.thought_rows import LOGPROB, add_thoughts

DECISION = 5422589164285029454
ORDERS = {"F ARM - ANK": "19.6%", "F LVN - BAL": "17.8%", "A SEV - MOS": "17.0%", "A WAR S F LVN": "6.9%"}
"""Of this decision in the stored run, with their probabilities."""
WICKED = "\x1b[2J<script>alert(1)</script>\nA PAR H\n\u202eétage"
"""It moves a terminal's cursor, runs in a page, has lines as orders have, and turns letters around."""


@pytest.fixture
def thinking(stored_run: RunPaths) -> Callable[..., str]:
    """`entente WORDS` about a run whose decisions have thoughts, some wicked ones ended by force: standard output."""

    def run(*words: str, thoughts: list[tuple[str, bool]]) -> str:
        add_thoughts(stored_run, thoughts)
        done = Entente(stored_run.root.parent)(*words, "--run", "before", "--runs-root", ".")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_decision_is_shown_with_its_thought_and_the_odds_of_its_orders_alone(thinking):
    said = thinking("runs", "inspect", "decision", str(DECISION), thoughts=[("Take Berlin.", False)])
    head = next(line for line in said.splitlines() if line.startswith("thought of "))
    number = int(head.split()[2])
    assert head == f"thought of {number} tokens, ended by itself, log-probability {number * LOGPROB:.2f}"
    assert f"{head}\nTake Berlin.\nORDERS:\n" + "\n".join(ORDERS) + "<|end|>" in said
    lines = [line.split() for line in said.splitlines()]
    assert all(any(line[: len(words)] == words for line in lines) for words in ([*o.split(), p] for o, p in ORDERS.items()))
    assert sum(line[-3:] == ["thought:", "any", str(LOGPROB) + "000"] for line in lines) == number


def test_a_thought_cannot_act_on_the_terminal(thinking):
    for words in (["decision", str(DECISION)], ["group", "0"]):
        said = thinking("runs", "inspect", *words, thoughts=[(WICKED, True)])
        assert "ended by force" in said and "\x1b" not in said and "\u202e" not in said
        assert "\\x1b[2J<script>" in said and "\\u202eétage" in said


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        pytest.param(
            "select count(*), count(distinct text), count(*) filter (truncated), sum(logprob) / sum(tokens) from thoughts",
            [32, 2, 16, LOGPROB],
            id="thoughts",
        ),
        pytest.param(
            "select any_value(h.text), any_value(truncated), any_value(h.tokens) = count(*) from thoughts h join tokens t "
            f"using (decision_id) where thought and decision_id = {DECISION}",
            [WICKED, True, True],
            id="one",
        ),
        pytest.param("select min(legal_tokens), max(legal_tokens) from tokens where thought", [553, 553], id="legal tokens"),
    ],
)  # fmt: skip
def test_sql_has_thoughts_and_counts_their_legal_tokens(thinking, question: str, answer: list[Any]):
    said = thinking("sql", question, "--format", "json", thoughts=[("Hold.", False), (WICKED, True)])
    assert list(json.loads(said).values()) == answer


def test_the_replay_page_has_the_thought_as_data_and_not_as_markup(thinking, stored_run: RunPaths):
    thinking("replay", "0/1", thoughts=[("Hold.", False), (WICKED, True), ("", False)])
    page = (stored_run.root / "replay-0-1.html").read_text()
    assert "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    decisions = [decision for phase_row in data["phases"] for decision in phase_row["decisions"].values()]
    found = {decision["thought"]["text"]: decision["thought"]["about"] for decision in decisions}
    assert "ended by force" in found["\\x1b[2J<script>alert(1)</script>\nA PAR H\n\\u202eétage"]
    assert found[""] == f"thought of 1 token, ended by itself, log-probability {LOGPROB:.2f}"
    (one,) = [decision for decision in decisions if decision["decision_id"] == str(DECISION)]
    assert math.exp(one["logprob"]) == pytest.approx(0.196 * 0.178 * 0.170 * 0.069, rel=0.03), "of the orders, given the thought"
    odds = [order[2] for order in data["phases"][1]["orders"]["5"]]
    assert odds == pytest.approx([0.196, 0.178, 0.170, 0.069], rel=0.03)


def test_the_report_shows_the_thoughts_of_scored_openings(thinking, stored_run: RunPaths):
    for who in ("base", "trained"):
        file = stored_run.scores / f"{who}.json"
        record = json.loads(file.read_text())
        for opening in record["score"]["openings"]:
            opening["thought"] = {"tokens": 9, "logprob": -12.345, "text": f"{who}: {WICKED}", "truncated": True}
        file.write_text(json.dumps(record))
    thinking("report", thoughts=[("Hold.", False)])
    page = (stored_run.root / "report.html").read_text()
    assert page.count("thought of 9 tokens, ended by force, log-probability -12.35") == 6
    assert page.count("base: \\x1b[2J&lt;script&gt;alert(1)&lt;/script&gt;\nA PAR H\n\\u202eétage</blockquote>") == 3
    assert "<script>" not in page and "given the orders above it and the thought" in page
