"""Comparing benchmarks: what has become worse is found, what merely differs is not."""

import json
from pathlib import Path

import pytest

from benchmarks import compare as comparing
from benchmarks.compare import QUICK, compare, read_outcomes, run_all, write_outcomes
from cli.commands import command_line
from telemetry.errors import InputError


def _outcome(**metrics: float) -> dict:
    return {"metrics": metrics, "targets": {"speedup": {"at_least": 8.0}, "loss_diff": {"at_most": 1e-6}}}


def _worse(before: dict, now: dict, tolerance: float = 0.25) -> list[str]:
    return [line.figure for line in compare({"x": before}, {"x": now}, tolerance=tolerance) if line.worse]


@pytest.mark.parametrize(
    ("before", "now", "worse"),
    [
        ({"speedup": 10.0}, {"speedup": 7.6}, []),
        ({"speedup": 10.0}, {"speedup": 7.4}, ["speedup"]),
        ({"loss_diff": 8e-7}, {"loss_diff": 1.1e-6}, ["loss_diff"]),
        ({"loss_diff": 1e-9}, {"loss_diff": 1e-8}, []),
        ({"machine_ms": 1.0}, {"machine_ms": 90.0}, []),
        ({"speedup": 10.0}, {}, ["speedup"]),
        ({}, {"speedup": 1.0}, []),
        ({"speedup": 10.0}, {"speedup": float("nan")}, ["speedup"]),
    ],
    ids=["within", "less", "error grew", "noise of nothing", "no target", "gone", "new", "nan"],
)
def test_only_what_became_worse_than_tolerance_counts(before: dict, now: dict, worse: list[str]):
    assert _worse(_outcome(**before), _outcome(**now)) == worse


def test_what_was_kept_is_read_again(tmp_path: Path):
    kept = _outcome(speedup=8.0) | {"scaled_down": ["loss_diff"]}
    write_outcomes(tmp_path / "deep" / "then.json", {"x": kept | {"benchmark": "x", "ok": True}})
    assert read_outcomes(tmp_path / "deep" / "then.json")["x"] == kept


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"benchmarks": {"x": 3}})])
def test_a_file_that_holds_no_figures_is_refused_with_its_name(tmp_path: Path, text: str):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError, match=r"bad\.json"):
        read_outcomes(tmp_path / "bad.json")


def test_every_quick_form_can_be_typed_and_the_trainers_has_recorded_rows_of_the_configured_run(tmp_path: Path, monkeypatch):
    asked: dict[str, list[str]] = {}
    (tmp_path / "a.toml").touch()
    monkeypatch.setattr(comparing, "_run", lambda name, arguments: asked.update({name: arguments}) or {})
    run_all([], runs_root=tmp_path, config=[tmp_path / "a.toml"])
    assert list(asked) == list(QUICK)
    for name, arguments in asked.items():
        command_line().parse_args(["bench", name, *arguments], exit_on_error=False, print_error=False)
    trainer = " ".join(asked["trainer"])
    assert "--only recorded" in trainer and trainer.endswith(f"--runs-root {tmp_path} --config {tmp_path / 'a.toml'}")
