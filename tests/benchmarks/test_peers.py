"""Figures against peers are of what they say, and a peer that is missing or of another version gives none."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.child import Child, PeerError
from benchmarks.peers.environments import PEERS, REQUIREMENTS, missing_sentence, read_pins
from benchmarks.peers.turns import middle, ratio, take_turns
from cli import main

ROOT = Path(__file__).resolve().parents[2]
OWN = sorted({peer.environment for peer in PEERS.values() if peer.environment})


def pretend(folder: Path, environment: str, **versions: str) -> None:
    """An environment that has these distributions."""
    packages = folder / environment / "lib" / "python3.11" / "site-packages"
    for name, version in versions.items():
        facts = packages / f"{name}-{version}.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def pinned(figure: str) -> str:
    return read_pins(PEERS[figure].recorded_in)[PEERS[figure].distribution]


# -- versions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [figure for figure, peer in PEERS.items() if peer.environment])
def test_a_missing_peer_and_one_of_another_version_are_told_apart_and_named_with_the_cure(tmp_path: Path, figure: str):
    peer, recorded = PEERS[figure], pinned(figure)
    cure = f"; `entente bench peers --install --only {figure} --environments {tmp_path}` installs it"
    start = f"{figure} is left out: {peer.distribution} {recorded} is recorded but "
    assert missing_sentence(figure, tmp_path) == f"{start}not installed{cure}"
    pretend(tmp_path / "other", peer.environment, **{peer.distribution: "0.1"})
    assert (missing_sentence(figure, tmp_path / "other") or "").startswith(f"{start}installed as 0.1; ")
    pretend(tmp_path, peer.environment, **{peer.distribution: recorded})
    assert missing_sentence(figure, tmp_path) is None


@pytest.mark.parametrize("name", OWN)
def test_both_arms_run_on_the_same_libraries(name: str):
    """Of what both environments have and what computes, the versions are the same."""
    theirs, ours = read_pins(REQUIREMENTS / f"peers-{name}.txt"), read_pins(REQUIREMENTS / "cpu.lock")
    computing = {"torch", "transformers", "peft", "accelerate", "numpy", "pyarrow", "tokenizers"} & theirs.keys()
    assert computing and {package: theirs[package] for package in computing} == {package: ours[package] for package in computing}


# -- what is measured ------------------------------------------------------------------------------------------------------


def test_arms_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    seconds = {"ours": iter([100.0, 1.0, 2.0, 4.0]), "theirs": iter([1.0, 3.0, 8.0, 8.0])}

    def arm(name: str):
        def measure(number: int) -> float:
            order.append(f"{name} {number}")
            return next(seconds[name])

        return measure

    rounds = take_turns({"ours": arm("ours"), "theirs": arm("theirs")}, 3, "test")
    assert order == ["theirs 0", "ours 0", "ours 1", "theirs 1", "theirs 2", "ours 2", "ours 3", "theirs 3"]
    assert ratio(rounds, "theirs") == 3.0  # of 3, 4 and 2
    assert middle(rounds, "ours") == 2.0 and middle(rounds, "theirs") == 8.0


@pytest.mark.parametrize(("words", "code"), [(["--only", "other"], 2), (["--rounds", "0"], 2)])
def test_the_command_refuses_at_once_what_it_cannot_measure(words: list[str], code: int, capsys, monkeypatch):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "peers", *words]) == code
    assert "measure" in capsys.readouterr().err


# -- programs --------------------------------------------------------------------------------------------------------------


PROGRAMS = sorted((ROOT / "benchmarks" / "peers" / "programs").glob("*.py"))
"""What runs in a peer's environment."""


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_a_program_of_a_peer_imports_nothing_of_ours_but_programs(file: Path):
    """Its environment has none of what our rooms need."""
    ours = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    imported = {
        name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name
    }
    theirs = "benchmarks.peers.programs."
    assert [name for name in imported if name.split(".")[0] in ours and not name.startswith(theirs)] == []


@pytest.fixture
def talkative(tmp_path: Path) -> Iterator[Child]:
    """A child that runs a program of the test instead."""
    program = tmp_path / "python"
    source = f"""#!{sys.executable}
import sys
from benchmarks.peers.programs.answer import ask, serve
print("a library's greeting")
def add(given):
    print("a library's remark")
    return {{"sum": sum(given) + ask({{"of": given}})["more"]}}
def fall(given):
    raise ValueError("the peer fell over")
serve({{"add": add, "fall": fall}})
"""
    program.write_text(source)
    program.chmod(0o755)
    with Child(program, "any") as child:
        yield child


def test_a_program_answers_asks_and_may_print(talkative: Child):
    asked = []
    answer = talkative.request("add", [1, 2], on_question=lambda question: (asked.append(question), {"more": 10})[1])
    assert answer == {"sum": 13} and asked == [{"of": [1, 2]}]
    with pytest.raises(PeerError, match="asked a question that nobody answers"):
        talkative.request("add", [1])


# -- whole -----------------------------------------------------------------------------------------------------------------
