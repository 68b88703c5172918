"""A stored arm is used again only for the commit, the settings and the machine that it was measured with."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks import kept_arms
from benchmarks.kept_arms import KeptArms, conditions_of
from telemetry.errors import InputError

HERE = {"commit": "a", "settings": "b", "machine": "c"}


def test_an_arm_that_was_measured_is_not_measured_again(tmp_path: Path):
    calls = []
    for _ in range(2):
        kept = KeptArms(tmp_path / "deep" / "arms.json", HERE)
        assert kept.once("a", lambda: calls.append("a") or {"x": 1}) == {"x": 1}
    assert calls == ["a"]
    assert KeptArms(tmp_path / "deep" / "arms.json", HERE).once("b", lambda: 2) == 2


@pytest.mark.parametrize("other", HERE)
def test_an_arm_of_another_commit_or_settings_or_machine_is_measured_anew_and_said(tmp_path: Path, other: str, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(kept_arms, "reporter", lambda: type("Said", (), {"say": said.append}))
    file = tmp_path / "arms.json"
    KeptArms(file, HERE).once("a", lambda: 1)
    assert KeptArms(file, HERE | {other: "x"}).once("a", lambda: 2) == 2
    assert said == [f"the stored arm 'a' is of another {other}: it is measured anew"]
    assert KeptArms(file, HERE | {other: "x"}).once("a", lambda: 3) == 2 and len(said) == 1
    assert KeptArms(file, HERE).once("a", lambda: 4) == 1 and len(said) == 1, "an earlier result is kept"


def test_a_result_without_conditions_is_not_used(tmp_path: Path):
    (tmp_path / "arms.json").write_text(json.dumps({"a": {"step_s": [1.0]}}))
    assert KeptArms(tmp_path / "arms.json", HERE).once("a", lambda: 2) == 2


@pytest.mark.parametrize("text", ["", "[1]"])
def test_a_file_of_no_results_is_refused(tmp_path: Path, text: str):
    (tmp_path / "arms.json").write_text(text)
    with pytest.raises(InputError, match=r"arms\.json"):
        KeptArms(tmp_path / "arms.json", HERE)


def test_conditions_follow_the_commit_the_changed_sources_and_the_settings(tmp_path: Path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    monkeypatch.setattr(kept_arms, "_ROOT", tmp_path)
    (tmp_path / "one.py").write_text("1")
    (tmp_path / "page.md").write_text("1")
    git("init", "-q")
    assert conditions_of({})["commit"] == version("entente"), "git knows no commit yet"
    git("add", ".")
    git("commit", "-qm", "a")
    clean = conditions_of({"steps": 1})
    (tmp_path / "page.md").write_text("2")
    assert conditions_of({"steps": 1}) == clean, "a page is no source"
    (tmp_path / "one.py").write_text("2")
    changed = conditions_of({"steps": 1})
    (tmp_path / "two.py").write_text("1")
    added = conditions_of({"steps": 1})
    (tmp_path / "libraries.lock").write_text("1")
    locked = conditions_of({"steps": 1})
    git("add", ".")
    git("commit", "-qm", "b")
    commits = [each["commit"] for each in (clean, changed, added, locked, conditions_of({"steps": 1}))]
    assert len(set(commits)) == 5 and changed["commit"].startswith(clean["commit"])
    assert conditions_of({"steps": 2})["settings"] != clean["settings"]
    assert clean["machine"].endswith("cores")
