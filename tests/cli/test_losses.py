"""`entente runs losses` compares losses on a real run's batches, as a table and as data; bad input is one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import main
from pipeline.run_settings import layered_settings
from storage.runs import RunPaths, held

TRIED = ["clipped", "cispo", "dppo", "gspo", "sequence_mean", "unclipped"]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, which saves the imports; its exit code."""
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    return lambda *words: main.run(["runs", "losses", *map(str, words)])


def test_a_run_s_batches_are_compared_while_it_is_at_work(trained, workplace):
    """As a user has it; and the run is at work as far as its locks can tell."""
    _, paths, _ = trained
    before = {file: file.stat().st_mtime_ns for file in paths.root.rglob("*")}
    with held(paths.lock), held(paths.trainer_lock):
        done = workplace("runs", "losses", "--run", "first", "--caps", "1", "2.5", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert list(facts["losses"]) == [*TRIED, "truncated at 1", "truncated at 2.5"]
    assert facts["version"] == 2 and set(facts["steps"]) <= {1, 2} and min(facts["branching_tokens"]) > 0
    for found in facts["losses"].values():
        assert 0 <= found["masked_share"] <= 1 and 0 < found["effective_sample_share"] <= 1 and found["gradient_norm"] > 0
    assert facts["cosines"]["clipped"]["clipped"] == pytest.approx(1, abs=1e-5)
    table = [line.strip() for line in done.stdout.splitlines()[2:-1]]
    assert len(table) == len(facts["losses"])
    assert all(line.startswith(name) for line, name in zip(table, facts["losses"], strict=True))
    assert {file: file.stat().st_mtime_ns for file in paths.root.rglob("*")} == before


def test_what_the_comparison_needs_and_cannot_have_is_one_sentence(trained, losses, tmp_path: Path, capsys):
    _, paths, _ = trained
    shutil.copytree(paths.root.parent / "_models", tmp_path / "_models")
    copied = RunPaths(shutil.copytree(paths.root, tmp_path / "copy"))
    shutil.rmtree(copied.checkpoints)
    assert losses("--run", "copy", "--runs-root", tmp_path) == 2
    assert "run 'copy' has no finished step to compare losses on yet" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "_models")
    assert losses("--run", "copy", "--runs-root", tmp_path) == 2
    assert "the model 'tiny' of run 'copy' is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run", "nowhere"], "nowhere"),
        (["--run", "bare", "--caps", "0"], "a cap of importance weights is above 0, and 0 is not"),
        (["--run", "bare", "--steps", "0"], "--steps"),
        (["--run", "bare", "--caps", "high"], "--caps"),
        (["--run", "bare"], "the model 'tiny' of run 'bare' is gone from this machine"),
    ],
    ids=["no run", "cap 0", "no steps", "no number", "no model"],
)
def test_bad_input_is_one_sentence(losses, tmp_path: Path, words: list[str], sentence: str, capsys):
    bare = RunPaths(tmp_path / "bare").create()
    bare.settings.write_text(layered_settings("laptop").model_dump_json())
    assert losses(*words, "--runs-root", tmp_path) == 2
    err = capsys.readouterr().err
    assert err.startswith("entente: ") and sentence in err and len(err.splitlines()) == 1
