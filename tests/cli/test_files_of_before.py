"""A run that was made before models could think is read as it was then, and its steps can be repeated.

The figures here were read from the run by the version that made it. They may not change.
"""

import json
import math
from collections.abc import Callable

import pytest

from cli import main
from storage.runs import RunPaths
from training.replay import TOLERANCES

DECISION = 5422589164285029454
PROMPT = "RUSSIA MOVEMENT F BLA A LVN A MOS F PRU\nORDERS:\n"
ORDERS = {"F BLA C A CON - RUM": "2.2%", "A LVN S F PRU": "9.4%", "A MOS - STP": "7.5%", "F PRU - BER": "18.6%"}
ADAPTERS = ["7f09d0f907c2ab53b024d15488be0027", "daf50a590b57e5cd7fe57cb190ed6f94"]


@pytest.fixture
def command(
    run_of_before: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`entente WORDS` about the stored run, in this process: exit code and standard output."""
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)

    def run(*words: str) -> tuple[int, str]:
        code = main.run([*words, "--run", "before", "--runs-root", str(run_of_before.root.parent)])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        pytest.param(
            "select policy_version, count(*), sum(centres_gained), sum(n_completion), sum(n_branching) from decisions "
            "group by all order by all",
            [[0, 20, 0.0, 420, 168], [1, 18, 2.0, 348, 125]],
            id="decisions",
        ),
        pytest.param(
            "select count(*), count(*) filter (forced), sum(legal_tokens), round(sum(logprob)::double, 2), "
            "count(*) filter (thought) from tokens",
            [[768, 475, 1372, -308.67, 0]],
            id="tokens",
        ),
        pytest.param("select step, count(*) from batches group by all order by all", [[1, 16], [2, 16]], id="batches"),
        pytest.param("select count(*) from plies union all select count(*) from thoughts", [[62], [0]], id="plies"),
        pytest.param(
            f"select string_agg(text, '' order by place) from tokens where decision_id = {DECISION}",
            [["\n".join(ORDERS) + "<|end|>"]],
            id="text by the run's own tokenizer",
        ),
    ],
)
def test_sql_answers_as_before(command, question: str, answer: list[list]):
    code, said = command("sql", question, "--format", "json")
    assert code == 0
    assert [list(json.loads(line).values()) for line in said.splitlines()] == answer


def test_a_decision_is_shown_as_before(command):
    code, said = command("runs", "inspect", "decision", str(DECISION))
    assert code == 0
    assert said.startswith("RUSSIA in F1902M, fork 1 of start group 0, ply 1, by policy version 0\ncomplete, return +1; ")
    assert f"{PROMPT}\n" + "\n".join(ORDERS) + "<|end|>\n" in said and "trained on in step 1" in said
    lines = [line.split() for line in said.splitlines()]
    assert all(any(line[: len(words)] == words for line in lines) for words in ([*o.split(), p] for o, p in ORDERS.items()))
    assert ["17", "'", "STP'", "5", "-1.7672"] in lines
    assert "thought" not in said


def test_a_step_and_its_widest_group_are_shown_as_before(command):
    code, said = command("runs", "inspect", "step", "2")
    assert code == 0 and said.startswith("step 2 of run before: 4 advantage groups\n")
    code, said = command("runs", "inspect", "group", "0")
    assert code == 0 and "4 forks, returns 2 apart, usable, trained on by 1 steps" in said


def test_report_and_replay_are_written_without_a_complaint(command, run_of_before: RunPaths):
    assert command("report") == (0, f"{run_of_before.root / 'report.html'}\n")
    page = (run_of_before.root / "report.html").read_text()
    assert "Rows are left out" not in page and 'class="trouble"' not in page and page.count("<article") == 2
    assert command("replay", "0/1")[0] == 0
    data = (run_of_before.root / "replay-0-1.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    decisions = [decision for ply in json.loads(data)["plies"] for decision in ply["decisions"].values()]
    assert [decision["id"] for decision in decisions][:2] == ["8579117307937443429", str(DECISION)] and len(decisions) == 3
    assert math.exp(decisions[1]["logprob"]) == pytest.approx(0.022 * 0.094 * 0.075 * 0.186, rel=0.03)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_repeated_from_its_files(command, step: int):
    """Bitwise on the machine that made it. Another kind of CPU may sum in another order, so it may differ as far as a GPU may."""
    code, said = command("runs", "replay-step", "--step", str(step), "--json")
    facts = json.loads(said.splitlines()[-1])
    assert code == (0 if facts["agrees"] else 1) and facts["from_step"] == step - 1
    assert facts["adapter_hash"]["recorded"] == ADAPTERS[step - 1]
    allowed, norm = TOLERANCES["float32"], facts["gradient_norm"]
    assert facts["agrees"] is (facts["adapter_hash"]["replayed"] == ADAPTERS[step - 1])
    assert norm["replayed"] == pytest.approx(norm["recorded"], rel=allowed.gradient_norm)
    losses = facts["micro_batches"]
    assert [len(update) for update in losses["replayed"]] == [len(update) for update in losses["recorded"]] == [1, 1]
    for recorded, replayed in zip(losses["recorded"], losses["replayed"], strict=True):
        assert replayed == pytest.approx(recorded, abs=allowed.loss)
