"""A step leaves one line in the run's own file, and one entry in W&B, which needs neither account nor network."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@pytest.mark.system
def test_offline_wandb_has_one_entry_per_step_and_the_report(tmp_path: Path, no_account: None, said: list[str]):
    figures = {"train/policy_lag_0_share": 0.75, "train/policy_lag_2_share": 0.25, "train/decisions": 8.0}
    scores = {"score/base": 0.25}
    logged = {0: {"mismatch/mean": 0.125}, 1: figures, 2: figures, 3: scores}
    report = tmp_path / "report.html"
    report.write_text("<title>a run</title>")
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(), {"steps": 5}) as log:
        for step, values in logged.items():
            log.log(step, values)
    log.finish(report)
    found = read_back(tmp_path, lambda found: found.artifacts.get("report") == ["report.html"])
    assert found.history == {0: logged[0], 1: figures, 2: figures | scores}, "scores belong to the last step"
    assert said == []


@pytest.mark.system
def test_a_resumed_run_goes_on_under_its_id_and_logs_no_step_twice(tmp_path: Path, no_account: None):
    file, settings = tmp_path / "metrics.jsonl", TelemetrySettings()
    lag = {"train/policy_lag_1_share": 1.0, "train/decisions": 4.0}
    ids = set()
    for steps in ((1,), (1, 2)):  # step 1 comes again, as after a kill
        if ids:
            time.sleep(1)  # W&B names its folders by the second
        with MetricLog(file, "a run", settings, {}, keep_to=0) as log:
            for step in steps:
                log.log(step, lag)
            log.log(9, {"score/base": 0.0})
        log.finish()
        newest = read_back(tmp_path, lambda found, step=steps[-1]: step in found.history)
        assert list(newest.history) == [steps[-1]]
        ids |= {each.name.rpartition("-")[2] for each in (tmp_path / "wandb").glob("offline-run-*")}
        assert (tmp_path / ".wandb_id").read_text() in ids
    assert len(ids) == 1


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
    assert read_back(tmp_path, lambda found: bool(found.history)).history == {1: {"train/loss": 0.5}}


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
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_NOTES", "a secret")
    wandb.teardown()  # it reads the environment once
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


@dataclass
class Written:
    """What W&B's own file holds."""

    history: dict[int, dict[str, float]]
    artifacts: dict[str, list[str]]
    """Files by artifact."""


def read_back(folder: Path, whole: Callable[[Written], bool] = lambda found: True) -> Written:
    """The newest offline run under `folder`, once its last records are there: W&B's own process may take a moment more."""
    until = time.monotonic() + 20
    while True:
        file = max((folder / "wandb").glob("offline-run-*/*.wandb"))
        found = written(file)
        if whole(found) or time.monotonic() > until:
            return found
        time.sleep(0.1)


def written(file: Path) -> Written:
    """What the records say: one of history per step, one per artifact."""
    found = Written(history={}, artifacts={})
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "artifact":
            found.artifacts[record.artifact.type] = [content.path for content in record.artifact.manifest.contents]
        elif kind == "history":
            keys = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = keys.pop("_step")
            assert step not in found.history, "a step has two entries"
            found.history[step] = {name: value for name, value in keys.items() if not name.startswith("_")}
    return found


def records(file: Path) -> Iterator[Any]:
    """The records of W&B's file: blocks of 32 KiB, in which a record lies in one piece or in several."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, pieces = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if left < 7 or kind == 0:
            place += left
            continue
        pieces += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(pieces)
            pieces = b""
