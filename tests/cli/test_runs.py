"""Claims about `entente runs` and the run that is meant where none is named."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from entente.evaluation.score_files import write_score
from entente.reports.read_run import list_runs
from entente.settings.check_settings import check_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from flows.open_run import with_run_name
from state_cache.settings import NEWEST
from storage.runs import RunPaths, check_run_name, resolve_run
from tests.command import Entente
from tests.made_scores import made_record

NOW = 1_700_000_000


def make_run(name: str, *, age: float, done: int = 0, steps: int = 4, summary: bool = False) -> RunPaths:
    """A run that wrote its last figure `age` seconds ago."""
    paths = RunPaths(Path("runs", name)).create()
    paths.settings.write_text(RunSettings(run=name, steps=steps).model_dump_json())
    lines = [json.dumps({"step": step, "time/step_s": 1.0, "rollout/decisions": 10.0}) for step in range(1, done + 1)]
    paths.metrics.write_text("\n".join(lines))
    if summary:
        paths.summary.write_text(json.dumps({"base_score": 0.25, "trained_score": 1.5, "steps": done, "decisions": 43}))
    for file in (paths.settings, paths.metrics):
        os.utime(file, (NOW - age, NOW - age))
    return paths


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run in each state, and what is no run."""
    monkeypatch.chdir(tmp_path)
    make_run("done", age=30, done=4, summary=True)
    make_run("cut", age=20, done=2)
    make_run("begun", age=10)
    for name in ("_models", ".hidden", "pictures"):
        Path("runs", name).mkdir()
    Path("runs", "notes.txt").write_text("no run")
    return Path("runs")


def states(runs_root: Path) -> dict[str, tuple[str, int, int]]:
    return {line.name: (line.state, line.done, line.planned) for line in list_runs(runs_root)}


def test_every_run_has_a_line_the_latest_last_and_nothing_else_has(several: Path):
    assert list(states(several).items()) == [
        ("done", ("complete", 4, 4)),
        ("cut", ("interrupted", 2, 4)),
        ("begun", ("interrupted", 0, 4)),
    ]
    done = list_runs(several)[0]
    assert (done.base_score, done.trained_score, done.decisions, done.written) == (0.25, 1.5, 43, NOW - 30)
    assert done.size == sum(file.stat().st_size for file in Path("runs/done").rglob("*") if file.is_file())


@pytest.mark.parametrize("damage", ["{", '{"steps": "many"}', None], ids=repr)
def test_a_damaged_run_is_listed_with_the_reason_and_is_never_the_latest(several: Path, damage: str | None):
    broken = make_run("broken", age=-10)
    (broken.ledger / "step-000001.arrow").touch()
    broken.settings.unlink() if damage is None else broken.settings.write_text(damage)
    line = {line.name: line for line in list_runs(several)}["broken"]
    assert line.state == "damaged" and line.trouble
    if damage not in ('{"steps": "many"}',):
        assert resolve_run(several, "latest") == "begun"


def test_cut_figures_and_a_damaged_summary_do_not_end_the_list(several: Path):
    with RunPaths(several / "cut").metrics.open("a") as figures:
        figures.write('\n{"step": 3, "time/st')
    RunPaths(several / "done").summary.write_text("{")
    assert states(several)["cut"] == ("interrupted", 2, 4)
    assert states(several)["done"][0] == "interrupted", "a resume writes the summary again"


def test_a_run_that_goes_on_has_no_trained_score_before_its_last_version_is_scored(several: Path):
    paths = RunPaths(several / "cut")
    for version, shown in ((2, None), (4, 0.5)):
        write_score(paths, made_record(policy_version=version, settings=RunSettings().evaluation))
        assert {line.name: line.trained_score for line in list_runs(several)}["cut"] == shown


def test_the_table_and_the_json_say_the_same(several: Path, entente: Entente):
    rows = [line.split()[:2] for line in entente("runs").stdout.splitlines()[1:]]
    facts = [json.loads(line) for line in entente("runs", "--json").stdout.splitlines()]
    assert rows == [[each["name"], each["state"]] for each in facts]
    assert {each["name"]: (each["state"], each["done"], each["planned"]) for each in facts} == states(several)


def test_a_command_says_which_run_it_took_and_nothing_where_it_was_named(several: Path, entente: Entente):
    make_run("newest", age=0, done=2)
    latest, named = entente("runs", "explain"), entente("runs", "explain", "--run", "cut")
    assert latest.stderr == "run newest, the latest in runs\n" and latest.stdout
    assert named.stderr == "" and named.stdout


def test_latest_is_the_run_that_wrote_last_and_other_names_are_themselves(several: Path):
    assert (resolve_run(several, "latest"), resolve_run(several, "cut"), resolve_run(several, "none")) == ("begun", "cut", "none")
    with pytest.raises(InputError, match="there is no run in 'nowhere' yet"):
        resolve_run(Path("nowhere"), "latest")
    make_run("latest", age=99)
    with pytest.raises(InputError, match="has the name"):
        resolve_run(several, "latest")


@pytest.mark.parametrize("name", ["latest", NEWEST])
def test_no_run_can_have_a_name_that_selects_another(name: str):
    with pytest.raises(InputError, match=f"cannot be named '{name}', which selects the run that"):
        check_settings(RunSettings(run=name))


def test_nothing_is_removed_of_the_latest_run(several: Path, entente: Entente):
    refused = entente("runs", "clean", "--run", "latest")
    assert refused.returncode == 2 and "name the run" in refused.stderr
    assert len(list_runs(several)) == 3


LONG = "a-run-with-a-name-that-is-as-long-as-one-may-be-" + "x" * 52


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 120])
def test_names_are_whole_however_narrow_the_terminal(
    several: Path, entente: Entente, columns: int, monkeypatch: pytest.MonkeyPatch
):
    narrow = {"width": columns, "force_terminal": True, "highlight": False, "color_system": None}
    monkeypatch.setattr("entente.cli.runs.output_console", lambda *_: Console(**narrow))
    make_run("tiny-seed0-20261128-101010-12ab", age=5, done=4, summary=True)
    lines = entente("runs").stdout.splitlines()
    assert all(len(line) <= columns for line in lines)
    if columns >= 40:
        row = ["tiny-seed0-20261128-101010-12ab", "complete"][: 1 + (columns > 40)]
        assert row in [line.split()[:2] for line in lines]
    if columns >= 80:
        assert "steps" in lines[0] and "trained" in lines[0]
    make_run(LONG, age=4)
    assert LONG in "".join(line.split()[0] for line in entente("runs").stdout.splitlines() if line.strip())


def test_a_pipe_has_all_columns_and_whole_names(several: Path, entente: Entente):
    make_run(LONG, age=5, done=4)
    lines = entente("runs").stdout.splitlines()
    assert "last written" in lines[0] and any(line.startswith(f"{LONG} ") for line in lines)


@pytest.mark.parametrize(
    "model", ["tiny", "models/Qwen 2.5 (old)", ".", "models/.hidden", "m" * 200, "models/ünïcode", "org/Model-1.5"]
)
def test_unnamed_runs_that_start_in_one_second_have_names_of_their_own_that_every_command_takes(model: str):
    settings = RunSettings()
    settings = settings.model_copy(update={"inference": settings.inference.model_copy(update={"model": model})})
    names = [with_run_name(settings).run for _ in range(2)]
    assert names[0] != names[1] and [check_run_name(name) for name in names] == names
