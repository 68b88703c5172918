"""`entente profile`: a baseline that is none is refused at once; the whole command, run for real, where time allows."""

import json
from pathlib import Path

import pytest

from cli.main import run
from tests.conftest import Entente

STORED = {"profile": "trainer", "stages": {"store": {"seconds": 1.0, "share": 1.0}}, "settings": {}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is no stored profile ([Errno 2]"),
        ("{", "is no stored profile"),
        ("[]", "is no stored profile"),
        ('{"profile": "rollout", "stages": {"engine": 3}}', "make one with `entente profile rollout`"),
        (json.dumps(STORED), "is a profile of 'trainer', not of 'rollout'"),
    ],
    ids=["missing", "cut", "a list", "without shares", "another kind"],
)
def test_a_baseline_that_cannot_be_compared_is_refused_before_anything_runs(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "before.json"
    if content is not None:
        file.write_text(content)
    assert run(["profile", "rollout", "--baseline", str(file)]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "1"], "--steps"),
        (["--tolerance", "2"], "--tolerance"),
        (["--output", "nowhere/to/be.json"], "there is no folder 'nowhere/to'"),
        (["--pipeline.buffer-depth", "9"], "pipeline.buffer_depth 9 exceeds"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], said: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["profile", "e2e", *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ") and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_profile_is_written_compared_and_leaves_no_run_behind(workplace: Entente, trained):
    def profile(kind: str, *words: str):
        return workplace("profile", kind, "--config", "small.toml", "--steps", "3", *words)

    first = profile("e2e", "--json")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout.splitlines()[-1])
    assert found == json.loads((workplace.folder / "profile-e2e.json").read_text())
    assert sum(each["share"] for each in found["stages"].values()) == pytest.approx(1, abs=1e-3)
    assert set(found["threads"]) == {"flow", "engine", "trainer"}
    assert "training/trainer.py: step" in (workplace.folder / "profile-e2e.html").read_text()
    assert not list((workplace.folder / "runs").glob("profile-*")), "the run that was profiled is gone"

    found["stages"] |= {"forward": {"seconds": 0, "share": -1.0}}
    (workplace.folder / "before.json").write_text(json.dumps(found))
    compared = profile("e2e", "--baseline", "before.json", "--tolerance", "0.9", "--output", "now.json")
    assert compared.returncode == 1 and "grew by more than 90%: forward" in compared.stdout

    rollout, trainer = profile("rollout"), profile("trainer")
    assert (rollout.returncode, trainer.returncode) == (0, 0), rollout.stderr + trainer.stderr
    assert "board and prompts" in rollout.stdout and "backward" in trainer.stdout
