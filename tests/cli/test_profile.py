"""`entente bench profile`: a baseline that is none is refused at once; the whole command, run for real, where time allows."""

import json
from pathlib import Path

import pytest

import cli.profile
from cli.main import run
from flows.profiled_work import Profiled
from tests.conftest import Entente

STORED = {"profile": "trainer", "stages": {"select": {"seconds": 1.0, "share": 1.0}}, "settings": {}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no stored profile"),
        ("[]", "is no stored profile"),
        ('{"profile": "rollout", "stages": {"engine": 3}}', "make one with `entente bench profile rollout`"),
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
    assert run(["bench", "profile", "rollout", "--baseline", str(file)]) == 2
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
    assert run(["bench", "profile", "e2e", *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ") and list(tmp_path.iterdir()) == []


def test_a_stage_that_grew_is_named_and_the_exit_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The work itself is a stand-in here: what is compared, written and said is the command's own."""
    stages = {"select": 1.0, "forward": 3.0}
    monkeypatch.setattr(cli.profile, "_measured", lambda *_: Profiled(stages=stages, windows=[(0.0, 4.0)]))
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "profile", "trainer"]) == 0
    stored = json.loads(Path("profile-trainer.json").read_text())
    assert stored["stages"]["forward"] == {"seconds": 3.0, "share": 0.75} and stored["flame_graphs"] == {}
    stages["select"] = 5.0
    compared = ["bench", "profile", "trainer", "--baseline", "profile-trainer.json", "--output", "now.json"]
    capsys.readouterr()
    assert run(compared) == 1
    said = capsys.readouterr().out
    assert "grew by more than 5%: select: 62.5% of the time, 25.0% in the baseline" in said and "the settings differ" not in said
    assert run([*compared, "--tolerance", "0.5"]) == 0 and "no stage's share grew" in capsys.readouterr().out
    assert run([*compared, "--tolerance", "0.5", "--training.layout", "padded"]) == 0
    assert "the settings differ from those of profile-trainer.json" in capsys.readouterr().out


@pytest.mark.slow
def test_a_profile_is_written_compared_and_leaves_no_run_behind(workplace: Entente, trained):
    def profile(kind: str, *words: str):
        return workplace.process("bench", "profile", kind, "--config", "small.toml", "--steps", "3", *words)

    first = profile("e2e", "--json")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout.splitlines()[-1])
    assert found == json.loads((workplace.folder / "profile-e2e.json").read_text())
    assert sum(each["share"] for each in found["stages"].values()) == pytest.approx(1, abs=1e-3)
    assert set(found["threads"]) == {"flow", "engine", "trainer"}
    assert set(found["flame_graphs"]) == {"flow", "engine", "trainer"}
    assert "training/trainer.py" in (workplace.folder / "profile-e2e-trainer.html").read_text()
    assert not list((workplace.folder / "runs").glob("profile-*")), "the run that was profiled is gone"

    found["stages"] |= {"forward": {"seconds": 0, "share": -1.0}}
    (workplace.folder / "before.json").write_text(json.dumps(found))
    compared = profile("e2e", "--baseline", "before.json", "--tolerance", "0.9", "--output", "now.json")
    assert compared.returncode == 1 and "grew by more than 90%: forward" in compared.stdout

    rollout, trainer = profile("rollout"), profile("trainer")
    assert (rollout.returncode, trainer.returncode) == (0, 0), rollout.stderr + trainer.stderr
    assert "board and prompts" in rollout.stdout and "backward" in trainer.stdout
