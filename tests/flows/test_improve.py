"""`entente improve` on a real run: rounds, a kill, and what they leave."""

import json
import os
import shutil
import signal
import time
from typing import Any

import psutil
import pytest

from entente.evaluation.score_files import read_track
from entente.reports.run_facts import read_facts
from storage.adapters import read_adapter
from storage.distil_store import distil_target_uses
from storage.distil_targets import open_distil_targets, recorded_distil_targets
from storage.ledger import read_ledger, recorded_steps
from storage.runs import RunPaths

SEARCH = "--search.proposals 2 --search.scripted mover --search.playouts 3 --search.player random"
WORDS = f"--positions 10 --distil_targets-per-step 4 --uses 2 {SEARCH}"


@pytest.fixture(scope="module")
def copy(workplace: Any, trained: Any) -> Any:
    """Copies of the small run: `copy("name")`."""

    def make(name: str) -> RunPaths:
        paths = RunPaths(workplace.folder / "runs" / name)
        shutil.rmtree(paths.root, ignore_errors=True)
        shutil.copytree(trained[1].root, paths.root)
        settings = json.loads(paths.settings.read_bytes())
        paths.settings.write_text(json.dumps(settings | {"run": name}))
        return paths

    return make


def improved(workplace: Any, name: str, *more: str, words: str = WORDS) -> dict[str, Any]:
    done = workplace.process("improve", "--run", name, *words.split(), *more, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def two_rounds(workplace: Any, copy: Any) -> tuple[RunPaths, list[dict[str, Any]]]:
    """A run that nobody killed: its folder, and what its two rounds came to."""
    return copy("improved"), improved(workplace, "improved", "--rounds", "2")["rounds"]


@pytest.mark.system
def test_two_rounds_train_on_the_distil_targets_of_two_students_and_are_replayed_bitwise(workplace, two_rounds):
    paths, rounds = two_rounds
    assert [each["round"] for each in rounds] == [1, 2] and all(each["distil_targets"] > 6 for each in rounds)
    track = {point.version: point.score.mean for point in read_track(paths)}
    assert all(each["score/eval"] == track[each["version"]] for each in rounds), "each round ends with a score"
    steps = recorded_steps(paths)
    assert rounds[-1]["version"] == steps[-1] > rounds[0]["version"] > 2
    uses = distil_target_uses(paths)
    assert set(uses.values()) == {2} and len(uses) == sum(each["distil_targets"] for each in rounds)
    students = [json.loads((paths.improve / f"round-000{number}.json").read_bytes())["student"] for number in (1, 2)]
    assert students[0] != students[1]
    for number, student in enumerate(students, start=1):
        table = open_distil_targets(paths.distil_targets / f"round-000{number}" / "000000.arrow").table
        visited = {*zip(table["policy_version"].to_pylist(), table["adapter_hash"].to_pylist(), strict=True)}
        assert [f"version {version} ({digest})" for version, digest in visited] == [student]
    facts = read_facts(paths)
    taught = [figures for step, figures in facts.steps.items() if step > 2]
    assert facts.done == rounds[-1]["version"] and len(taught) == facts.done - 2, "the report has the steps of the rounds"
    assert not any("train/reward" in figures for figures in taught), "nothing was played, so there is no return"
    assert [point.version for point in facts.track][-2:] == [each["version"] for each in rounds]
    replayed = workplace("runs", "replay-step", "--run", "improved", "--step", str(steps[-1]))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.fixture(scope="module")
def mixed(workplace: Any, copy: Any) -> tuple[RunPaths, dict[str, Any]]:
    """A run after a round with rollouts, and what the round came to."""
    words = f"--rollouts --positions 4 --distil_targets-per-step 4 --uses 1 {SEARCH}"
    return copy("mixed"), improved(workplace, "mixed", words=words)["rounds"][0]


@pytest.mark.in_turn
@pytest.mark.system
def test_a_round_may_have_rollouts_too(mixed):
    paths, found = mixed
    ledgers = [read_ledger(paths, step) for step in range(3, found["version"] + 1)]
    assert all(ledger is not None and recorded_distil_targets(ledger) for ledger in ledgers)
    assert any(ledger.num_rows for ledger in ledgers if ledger is not None)


@pytest.mark.slow
def test_training_goes_on_after_a_round(workplace, mixed):
    """As the round itself goes on after training, and a round after a round: all open the run alike."""
    _, found = mixed
    done = workplace.process("train", "--run", "mixed", "--resume", "--steps", str(found["version"] + 1))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_round_that_was_killed_ends_with_the_weights_of_one_that_was_not(workplace, copy, two_rounds):
    """Quick tests hold its parts: labels are asked once, no target is used twice, a round that was begun keeps its settings."""
    killed, (whole, (found, _)) = copy("killed-round"), two_rounds
    process = workplace.start("improve", "--run", "killed-round", *WORDS.split())
    while process.poll() is None and len(recorded_steps(killed)) < 4:  # two steps of the run, and the second of the round
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert psutil.wait_procs(family, timeout=30)[1] == [], "no process outlives the command"
    (again,) = improved(workplace, "killed-round")["rounds"]
    assert again["version"] == found["version"]
    assert read_adapter(killed, again["version"]) == read_adapter(whole, found["version"])
    uses, uses_of_whole = distil_target_uses(killed), distil_target_uses(whole)
    assert len(uses) == found["distil_targets"] and uses == {
        distil_target: uses_of_whole[distil_target] for distil_target in uses
    }
