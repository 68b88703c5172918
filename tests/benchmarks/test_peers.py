"""Figures against a peer are of what they say, and a peer that is missing gives none."""

import random
from pathlib import Path

import pytest

from benchmarks.peers.bench import take_turns
from benchmarks.peers.trl_program import Walks, padded
from benchmarks.peers.trl_whole import Arm, Question, questions_of
from benchmarks.trainer_cases import Case, made_up_batch
from entente.cli import main
from entente.decoding.legal_table import END
from entente.game.board import Board
from entente.game.players import player
from entente.game.snapshot import Snapshot
from entente.players.seeds import dice
from entente.rollouts.fork import Tokens
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "deploy" / "locks" / name).read_text().splitlines())
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)


def test_both_arms_run_on_the_same_libraries():
    """Of what both environments have and what computes, the versions are the same."""
    theirs, ours = pins("peers-trl.txt"), pins("cpu.lock")
    computing = {"torch", "transformers", "peft", "accelerate", "numpy", "pyarrow", "tokenizers"} & theirs.keys()
    assert computing and {package: theirs[package] for package in computing} == {package: ours[package] for package in computing}


def test_arms_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    seconds = {"ours": iter([100.0, 1.0, 2.0, 4.0]), "theirs": iter([1.0, 3.0, 8.0, 8.0])}

    def measure(name: str) -> float:
        order.append(name)
        return next(seconds[name])

    rounds = take_turns({name: lambda name=name: measure(name) for name in seconds}, 3)
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert rounds == [{"ours": 1.0, "theirs": 3.0}, {"ours": 2.0, "theirs": 8.0}, {"ours": 4.0, "theirs": 8.0}]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--rounds", "0"], "measure"),
        ([], "docs/performance.md"),
        (["--whole-s", "0"], "trained"),
        (["--whole-s", "9"], "docs/performance.md"),
    ],
)
def test_the_command_refuses_at_once_what_it_cannot_measure(words: list[str], why: str, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("entente.cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "peers", "--trl-python", str(tmp_path / "python"), *words]) == 2
    assert why in capsys.readouterr().err


def test_rows_are_padded_as_trl_pads_them():
    batch = made_up_batch(Case(positions=2, forks=3, own=9, completion=4, spread=0.5), vocabulary=64)
    names = ("input_ids", "input_offsets", "prompt_lens", "completion_offsets")
    rows = {name: getattr(batch, name) for name in names} | {"advantages": batch.returns}
    for first in range(0, len(batch.prompt_lens), 2):
        found = padded(rows, first, 2)
        for place, row in enumerate(range(first, min(first + 2, len(batch.prompt_lens)))):
            kept = [found[f"{part}_ids"][place][found[f"{part}_mask"][place] == 1].tolist() for part in ("prompt", "completion")]
            assert kept[0] + kept[1] == batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
            assert len(kept[0]) == batch.prompt_lens[row]


@pytest.fixture(scope="module")
def settings() -> RunSettings:
    changed = {"steps": 2, "rollouts": {"start_groups": 4, "forks_per_group": 3, "horizon_years": 1}}
    return layered_settings("laptop", (), changed)


@pytest.fixture(scope="module")
def questions(settings: RunSettings, positions: list[Snapshot], tokens: Tokens) -> list[Question]:
    return questions_of(settings, positions, tokens)


def gain_of(orders: list[str], question: Question, luck: str) -> int:
    """Centres gained by these orders within their year, played on the board phase by phase; all others order at random."""
    board = Board.restore(question.snapshot)
    before, year, first = board.centres()[question.power], board.year, True
    while board.year == year and board.phase_type != "A":
        others = {
            power: player("random")(legal, dice(luck, board.phase, power), board) for power, legal in board.legal_orders().items()
        }
        board.step(others | ({question.power: orders} if first else {}))
        first = False
    return len(board.centres()[question.power]) - len(before)


def test_the_reward_is_what_the_answer_gains_on_the_board_and_a_unit_without_a_legal_order_holds(
    settings: RunSettings, questions: list[Question]
):
    draws, texts, numbers, expected = random.Random(4), [], [], []
    for number, question in enumerate(questions):
        for fork in range(3):
            orders = [draws.choice(options) for options in question.legal.options]
            spoilt = draws.randrange(len(orders)) if fork else None
            lines = [f"{order} - XYZ" if place == spoilt else order for place, order in enumerate(orders)]
            if spoilt is not None:
                orders[spoilt] = f"{question.legal.sites[spoilt]} H"
            texts.append("\n".join(lines))
            numbers.append(number)
            expected.append(gain_of(orders, question, f"peers/1/{number}"))
    assert Arm("free", questions, settings.rollouts).rewards(texts, numbers, 1.0)["rewards"] == expected
    assert len(set(expected)) > 1


def test_the_arrays_allow_what_the_table_allows(questions: list[Question]):
    names = ("offsets", "token_ids", "next_nodes")
    walks = Walks([{name: getattr(question.table, name) for name in names} for question in questions], after_end=7)
    draws = random.Random(5)
    for row, question in enumerate(questions):
        state = question.table.start
        while state != END:
            allowed = question.table.allowed(state).tolist()
            assert walks.allowed(row) == allowed
            token = draws.choice(allowed)
            walks.follow(row, token)
            state = question.table.advance(state, token)
        walks.follow(row, 7)
        assert walks.allowed(row) == [7]
