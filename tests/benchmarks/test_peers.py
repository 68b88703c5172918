"""Figures against peers are of what they say, and a peer that is missing gives none."""

import itertools
import sys
from pathlib import Path

import pytest

from benchmarks.peers.bench import missing, ratio, take_turns
from benchmarks.peers.grammars import AnswerRules, answer_rules, to_ebnf
from benchmarks.peers.trl_program import padded
from benchmarks.trainer_cases import Case, made_up_batch
from cli import main
from game.legal import WAIVE, LegalOrders, OrderKind

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)


def test_both_arms_run_on_the_same_libraries():
    """Of what both environments have and what computes, the versions are the same."""
    theirs, ours = pins("peers-trl.txt"), pins("cpu.lock")
    computing = {"torch", "transformers", "peft", "accelerate", "numpy", "pyarrow", "tokenizers"} & theirs.keys()
    assert computing and {package: theirs[package] for package in computing} == {package: ours[package] for package in computing}


def test_a_missing_environment_leaves_its_figure_out_with_the_cure(tmp_path: Path):
    assert missing("trl_step", Path(sys.executable)) is None
    assert "docs/performance.md" in (missing("trl_step", tmp_path / "python") or "")


def test_arms_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    seconds = {"ours": iter([100.0, 1.0, 2.0, 4.0]), "theirs": iter([1.0, 3.0, 8.0, 8.0])}

    def measure(name: str) -> float:
        order.append(name)
        return next(seconds[name])

    rounds = take_turns({name: lambda name=name: measure(name) for name in seconds}, 3, "test")
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert ratio(rounds, "theirs") == 3.0  # of 3, 4 and 2


@pytest.mark.parametrize("words", [["--only", "other"], ["--rounds", "0"]])
def test_the_command_refuses_at_once_what_it_cannot_measure(words: list[str], capsys, monkeypatch):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "peers", *words]) == 2
    assert "measure" in capsys.readouterr().err


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


# -- grammars --------------------------------------------------------------------------------------------------------------


def legal(kind: OrderKind, options: list[list[str]], picks: int | None = None) -> LegalOrders:
    sites = tuple(own[0][:5] for own in options)
    return LegalOrders(
        power="FRANCE",
        kind=kind,
        sites=sites,
        options=tuple(map(tuple, options)),
        picks=len(options) if picks is None else picks,
    )


MOVES = legal(OrderKind.MOVEMENT, [["A PAR - BUR", "A PAR H"], ["F BRE - ENG", "F BRE H", "F BRE S A PAR - PIC"]])
BUILDS = legal(OrderKind.BUILD, [["A BRE B", "F BRE B"], ["A MAR B", "F MAR B"], ["A PAR B"]], picks=2)
DISBANDS = legal(OrderKind.DISBAND, [["A PAR D"], ["A BUR D"], ["F BRE D"], ["F MAR D"]], picks=2)


def language(answer: AnswerRules, rule: str = "start") -> list[str]:
    """Every text of the rules, each as often as the rules spell it."""
    texts = []
    for terminal, after in answer.rules[rule]:
        tails = [f"\n{tail}" for tail in language(answer, after)] if after else [""]
        texts += [line + tail for line in answer.terminals[terminal] for tail in tails]
    return texts


def legal_texts(asked: LegalOrders) -> list[str]:
    """By trying every sequence of lines."""
    lines = [*(line for own in asked.options for line in own), *([WAIVE] if asked.kind is OrderKind.BUILD else [])]
    return ["\n".join(orders) for orders in itertools.product(lines, repeat=asked.picks) if asked.admits(orders)]


@pytest.mark.parametrize("asked", [MOVES, BUILDS, DISBANDS], ids=["movement", "build", "disband"])
def test_the_rules_spell_every_legal_answer_once_and_nothing_else(asked: LegalOrders):
    answer = answer_rules(asked)
    assert all(answer.rules.values()), "a rule without alternatives is a dead end"
    assert sorted(language(answer)) == sorted(legal_texts(asked))


def test_the_grammar_is_written_as_xgrammar_reads_it():
    assert to_ebnf(MOVES).splitlines() == [
        "root ::= start",
        'start ::= t0 "\\n" site_1',
        "site_1 ::= t1",
        't0 ::= "A PAR - BUR" | "A PAR H"',
        't1 ::= "F BRE - ENG" | "F BRE H" | "F BRE S A PAR - PIC"',
    ]
