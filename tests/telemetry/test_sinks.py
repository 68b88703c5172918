"""A step leaves one line in the run's own file, and one entry in W&B, which needs neither account nor network."""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb

from entente.telemetry import sinks
from entente.telemetry.sinks import MetricLog, TelemetrySettings

NO_WANDB = TelemetrySettings(wandb="disabled")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_step_is_one_line_with_its_number_and_its_values(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    logged = {0: {"mismatch/mean": 1e-6}, 1: {"train/loss": -0.25, "train/decisions": 16.0}, 2: {"train/loss": 0.5}}
    with MetricLog(file, "a run", NO_WANDB, {}) as log:
        for step, values in logged.items():
            log.log(step, values)
            assert len(lines(file)) == step + 1, "a line is there as soon as it is logged: a run may be killed"
    assert [line.pop("time") > 1.7e9 for line in lines(file)] == [True] * 3
    assert [{name: value for name, value in line.items() if name != "time"} for line in lines(file)] == [
        {"step": step} | values for step, values in logged.items()
    ]


def test_a_metric_that_is_not_registered_is_refused_and_nothing_of_its_step_is_written(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    with MetricLog(file, "a run", NO_WANDB, {}) as log, pytest.raises(KeyError, match="train/lost"):
        log.log(1, {"train/loss": 1.0, "train/lost": 2.0})
    assert lines(file) == []


def test_a_log_that_is_opened_again_forgets_steps_that_come_again_and_a_line_that_was_cut(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    with MetricLog(file, "a run", NO_WANDB, {}) as log:
        for step in range(5):
            log.log(step, {"train/loss": float(step)})
    file.write_text(file.read_text() + '{"step": 5, "train/lo')
    with MetricLog(file, "a run", NO_WANDB, {}, keep_to=3) as log:
        assert log.last_step == 3
        log.log(4, {"train/loss": 40.0})
    assert [(line["step"], line["train/loss"]) for line in lines(file)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B as it is for somebody who never heard of it."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


class OpenRun:
    """What W&B opens, as far as a log uses it."""

    def __init__(self, **asked: Any) -> None:
        self.id, self.logged, self.artifacts, self.summary = asked["id"], dict[int, Any](), list[Any](), dict[str, Any]()
        self.notes = asked["notes"]

    def log(self, values: Any, step: int) -> None:
        self.logged[step] = self.logged.get(step, {}) | values

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self, exit_code: int) -> None:
        assert exit_code == 0


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, no_account: None) -> list[OpenRun]:
    """The runs that W&B opened."""
    found: list[OpenRun] = []

    def init(**asked: Any) -> OpenRun:
        found.append(OpenRun(**asked))
        return found[-1]

    monkeypatch.setattr(wandb, "init", init)
    return found


def test_wandb_has_one_entry_per_step_and_the_report(tmp_path: Path, opened: list[OpenRun], said: list[str]):
    figures, scores = {"train/policy_lag_0_share": 0.75, "train/decisions": 8.0}, {"score/base": 0.25}
    report = tmp_path / "report.html"
    report.write_text("<title>a run</title>")
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(), {"steps": 5}) as log:
        for step, values in enumerate(({"mismatch/mean": 0.125}, figures, figures, scores)):
            log.log(step, values)
    log.finish(report)
    (run,) = opened
    assert run.logged == {0: {"mismatch/mean": 0.125}, 1: figures, 2: figures | scores}, "scores belong to the last step"
    assert run.summary["view"] == f"entente view {tmp_path.name} --step 2 --runs-root {tmp_path.parent}" and "view" in run.notes
    assert [list(artifact.manifest.entries) for artifact in run.artifacts] == [["report.html"]] and said == []


def test_a_resumed_run_goes_on_under_its_id_and_logs_no_step_twice(tmp_path: Path, opened: list[OpenRun]):
    lag = {"train/policy_lag_1_share": 1.0, "train/decisions": 4.0}
    for steps in ((1,), (1, 2)):  # step 1 comes again, as after a kill
        with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(), {}, keep_to=0) as log:
            for step in steps:
                log.log(step, lag)
            log.log(9, {"score/base": 0.0})
        log.finish()
    assert [list(run.logged) for run in opened] == [[1], [2]]
    assert {f"{run.id} a run\n{tmp_path}" for run in opened} == {(tmp_path / ".wandb_id").read_text()}


def test_each_run_of_a_process_stages_its_files_in_its_own_folder_unless_the_user_names_another(
    tmp_path: Path, opened: list[OpenRun], monkeypatch: pytest.MonkeyPatch
):
    def data_dir(run: str) -> str:
        (tmp_path / run).mkdir()
        MetricLog(tmp_path / run / "metrics.jsonl", run, TelemetrySettings(), {}).close()
        return os.environ["WANDB_DATA_DIR"]

    assert data_dir("first") == str(tmp_path / "data"), "the user's"
    monkeypatch.delenv("WANDB_DATA_DIR")
    assert [data_dir(run) for run in ("second", "third")] == [str(tmp_path / run / "wandb") for run in ("second", "third")]


def test_a_copy_of_a_run_has_an_entry_of_its_own_with_every_step_that_it_trains(tmp_path: Path, opened: list[OpenRun]):
    for name in ("mine", "copy", "mine", "copy"):
        if not (folder := tmp_path / name).exists():
            shutil.copytree(tmp_path / "mine", folder) if opened else folder.mkdir()
        with MetricLog(folder / "metrics.jsonl", name, TelemetrySettings(), {}) as log:
            log.log(len(opened), {"train/loss": 0.5})
            log.log(1, {"train/loss": 0.5})
        log.finish()
    mine, copy, mine_again, copy_again = opened
    assert mine.id == mine_again.id != copy.id == copy_again.id
    assert [[*run.logged] for run in opened] == [[1], [2, 1], [3], [4]]


def test_a_copy_under_the_same_name_in_another_folder_has_an_entry_of_its_own_and_a_moved_run_keeps_its(
    tmp_path: Path, opened: list[OpenRun], said: list[str]
):
    """Both went on under one id: W&B mixed their steps, or dropped those of the one that was behind."""
    first, second, third = (tmp_path / root / "mine" for root in ("runs", "other", "moved"))
    first.mkdir(parents=True)
    for folder in (first, second, first, second, third):
        if folder == second and not second.exists():
            shutil.copytree(first, second)
        if folder == third:
            shutil.move(second, third)
        MetricLog(folder / "metrics.jsonl", "mine", TelemetrySettings(), {}).close()
    mine, copy, mine_again, copy_again, moved = (run.id for run in opened)
    assert mine == mine_again != copy == copy_again == moved
    assert len(said) == 1 and f"in '{second}', because the former one is that of '{first}'" in said[0]


def test_a_renamed_run_says_that_its_earlier_steps_are_under_its_former_name(
    tmp_path: Path, opened: list[OpenRun], said: list[str]
):
    for name in ("old", "new"):
        (tmp_path / "old").rename(tmp_path / "new") if opened else (tmp_path / "old").mkdir()
        MetricLog(tmp_path / name / "metrics.jsonl", name, TelemetrySettings(), {}).close()
    assert len({run.id for run in opened}) == 2
    assert len(said) == 1 and "W&B gets a new entry for run 'new'" in said[0] and f"'{tmp_path / 'old'}'" in said[0]


@pytest.mark.system
def test_wandb_without_a_login_is_one_sentence_and_the_run_goes_on_offline(tmp_path: Path, no_account: None, said: list[str]):
    online = TelemetrySettings(wandb="online")
    with MetricLog(tmp_path / "metrics.jsonl", "a run", online, {}) as log:
        log.log(1, {"train/loss": 0.5})
    log.finish()
    assert said == [
        "W&B has no login (no API key is configured): the run goes on and will write offline; `wandb sync` sends it later; "
        "metrics.jsonl has every figure. To mend it, log in by `wandb login`."
    ]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.system
def test_wandb_without_a_network_is_one_sentence_and_the_run_goes_on_without_it(
    tmp_path: Path, no_account: None, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sinks, "REACH_S", 3)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()  # it reads the environment once
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(wandb="online"), {}) as log:
        log.log(1, {"train/loss": 0.5})
    log.finish()
    (sentence,) = said
    assert sentence.startswith("W&B cannot be opened (") and "the run goes on and will write no more to it" in sentence
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
    wandb.teardown()


REFUSED = {
    "WANDB_MODE": ("nowhere", ""),
    "WANDB_INIT_TIMEOUT": ("soon",),
    "WANDB_TAGS": ("", "x" * 100),
    "WANDB_CONSOLE": ("loud",),
    "WANDB_RESUME": ("perhaps",),
    "WANDB_RUN_ID": ("a/b",),
    "WANDB_BASE_URL": ("nowhere",),
    "WANDB_HTTP_PROXY": ("::",),
    "WANDB_SILENT": ("perhaps",),
    "WANDB_SERVICE": ("nowhere",),
}
"""Variables with values that W&B refuses before it starts anything."""


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_variable_that_wandb_refuses_is_one_sentence_and_the_run_goes_on(
    tmp_path: Path,
    no_account: None,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    mode: sinks.WandbMode,
):
    wandb.teardown()  # it reads the environment once; the end of a service of an earlier test removes WANDB_SERVICE
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_NOTES", "a secret")
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(wandb=mode), {}) as log:
        log.log(1, {"train/loss": 0.5})
    log.finish(failed=True)
    (sentence,) = said
    assert sentence.startswith("W&B cannot be opened (") and f"correct {name}," in sentence and "secret" not in sentence
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no space left"), SystemExit(1), wandb.Error("")])
@pytest.mark.parametrize("step", ["setup", "Settings", "login", "init"])
def test_wandb_never_ends_a_run_wherever_it_fails(
    tmp_path: Path, no_account: None, said: list[str], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
):
    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("setup", "login", "init"):
        monkeypatch.setattr(wandb, name, Mock())
    monkeypatch.setattr(wandb, step, fail)
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(wandb="online"), {}) as log:
        log.log(1, {})
    assert len(said) == 1


@pytest.mark.parametrize(
    ("mode", "variable", "expected"),
    [
        ("offline", "disabled", None),
        ("online", "disabled", None),
        ("online", "offline", "offline"),
        ("online", "dryrun", "offline"),
        ("offline", "online", "offline"),
        ("disabled", "online", None),
        ("online", None, "online"),
        ("online", "nowhere", "online"),
    ],
)
def test_wandb_mode_in_the_environment_lowers_the_setting_and_never_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: sinks.WandbMode, variable: str | None, expected: str | None
):
    opened: list[str] = []
    monkeypatch.setattr(sinks, "WandbRun", lambda folder, name, mode, configuration: opened.append(mode))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(wandb=mode), {}).close()
    assert opened == [expected] * (expected is not None)


@pytest.mark.system
def test_wandb_that_fails_later_is_given_up_with_one_sentence(tmp_path: Path, no_account: None, said: list[str]):
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(), {}) as log:
        assert log._wandb is not None
        opened = log._wandb._run
        log._wandb._run = type("Full", (), {"log": full})
        for step in (1, 2):
            log.log(step, {"train/loss": 0.5})
    opened.finish()
    assert [sentence.split(":")[0] for sentence in said] == ["W&B failed (no space left)"]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
