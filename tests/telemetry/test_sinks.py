"""A step leaves one line in the run's own file, and one entry in W&B, which needs neither account nor network."""

import json
import struct
import time
from pathlib import Path

import pytest

from telemetry.errors import InputError
from telemetry.sinks import MetricLog, TelemetrySettings

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


def test_a_log_that_is_opened_again_goes_on_where_it_was(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricLog(file, "a run", NO_WANDB, {}, keep_to=step - 1) as log:
            assert log.last_step == (step - 1 or -1)
            log.log(step, {"train/loss": 0.0})
    assert [line["step"] for line in lines(file)] == [1, 2]


def test_disabled_wandb_leaves_no_trace(tmp_path: Path):
    with MetricLog(tmp_path / "metrics.jsonl", "a run", NO_WANDB, {}) as log:
        log.log(1, {"train/loss": 0.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


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


def test_offline_wandb_writes_a_run_folder_with_one_entry_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    logged = {0: {"mismatch/mean": 0.125}, 1: {"train/loss": 1.5}, 5: {"train/loss": 0.5, "train/decisions": 7.0}}
    with MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(), {"steps": 5}) as log:
        for step, values in logged.items():
            log.log(step, values)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    until = time.monotonic() + 20
    while wandb_history(file) != logged and time.monotonic() < until:
        time.sleep(0.1)  # W&B's own process may write its last records a moment after it says that it has
    assert wandb_history(file) == logged


def test_wandb_that_cannot_open_is_the_user_s_to_mend_and_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(InputError, match=r"API key.*wandb login.*set telemetry.wandb to 'offline'"):
        MetricLog(tmp_path / "metrics.jsonl", "a run", TelemetrySettings(wandb="online"), {})


def wandb_history(file: Path) -> dict[int, dict[str, float]]:
    """The entries of a W&B file by step: after 7 bytes, records of checksum, length, kind and one protobuf message."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, found = file.read_bytes(), 7, {}
    assert len(content) < 32768, "longer files cut records at blocks"
    while place < len(content):
        _, length, _ = struct.unpack_from("<IHB", content, place)
        record = Record.FromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = values.pop("_step")
            assert step not in found, "a step has two entries"
            found[step] = {name: value for name, value in values.items() if not name.startswith("_")}
    return found
