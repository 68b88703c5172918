"""What a run tells its producers is whole whenever it is read, and what they tell of themselves says who is lost."""

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from records.policy_version import BASE, PolicyVersion
from storage.control import (
    LOST_AFTER_S,
    ControlDesk,
    ProducerStatus,
    read_control,
    read_producer,
    read_producers,
    write_producer,
)
from storage.runs import RunPaths
from telemetry.errors import DataError, InputError

NOW = 1_800_000_000.0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run").create()


def desk(paths: RunPaths, **changes: object) -> ControlDesk:
    return ControlDesk(paths, base_model="b", plays="p", quota=4, max_policy_lag=2)


def status(**told: object) -> ProducerStatus:
    whole = ProducerStatus(
        producer="one",
        state="playing",
        published=3,
        in_flight=2,
        next_group=5,
        version=1,
        alive_at=NOW,
        began_at=NOW - 100,
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_run="",
        sentence="",
    )
    return replace(whole, **told)  # type: ignore[arg-type]


def test_what_is_told_is_what_is_read(paths: RunPaths):
    told = desk(paths)
    told.serve(BASE)
    assert read_control(paths) == told.control and told.control.adapter == "" and told.control.oldest == 0
    told.serve(PolicyVersion(version=7, adapter=paths.adapter(7), adapter_hash="abc"))
    control = read_control(paths)
    assert (control.version, control.adapter, control.adapter_hash, control.oldest) == (7, "adapters/v000007", "abc", 5)
    assert control.policy == PolicyVersion(version=7, adapter_hash="abc")
    assert control.wants("one") and control.quota == 4


def test_one_producer_is_dismissed_and_all_are_stopped(paths: RunPaths):
    told = desk(paths)
    told.dismiss(["one"])
    told.dismiss(["two"])
    control = read_control(paths)
    assert not control.wants("one") and not control.wants("two") and control.wants("three")
    told.stop("over")
    assert not read_control(paths).wants("three") and read_control(paths).reason == "over"


def test_the_counter_grows_over_resumed_runs_and_over_damage(paths: RunPaths):
    first = desk(paths)
    first.stop("over")
    again = desk(paths)
    again.serve(BASE)
    assert read_control(paths).counter > first.control.counter and not read_control(paths).stop
    paths.control.write_bytes(b"{")
    third = desk(paths)
    third.serve(BASE)
    assert read_control(paths).counter > again.control.counter


@pytest.mark.parametrize(
    "change",
    [{"version": "7"}, {"stop": 0}, {"counter": True}, {"dismissed": "one"}, {"adapter_hash": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_control_file_that_was_altered_is_refused_with_its_name(paths: RunPaths, change: dict[str, object]):
    told = desk(paths)
    told.serve(BASE)
    paths.control.write_text(json.dumps(asdict(told.control) | change))
    with pytest.raises(DataError, match=r"control\.json is damaged.*written again"):
        read_control(paths)


def test_damaged_and_foreign_status_files_hide_no_other(paths: RunPaths):
    assert read_producers(paths) == ([], []) and read_producer(paths, "one") is None
    write_producer(paths, status())
    write_producer(paths, status(producer="two"))
    (paths.producers / "two.json").write_text("[1]")
    (paths.producers / "notes.txt").write_text("mine")
    found, damaged = read_producers(paths)
    assert found == [status()] and len(damaged) == 1 and "two.json is damaged" in damaged[0]


def test_a_producer_steps_out_of_no_run(paths: RunPaths):
    with pytest.raises(InputError, match="cannot name a folder"):
        write_producer(paths, status(producer="../one"))


def test_silence_makes_a_producer_lost_and_a_word_of_its_end_does_not():
    elsewhere = status(host="another-machine")
    assert not elsewhere.lost(NOW + LOST_AFTER_S - 1) and elsewhere.at_work(NOW + LOST_AFTER_S - 1)
    assert elsewhere.lost(NOW + LOST_AFTER_S + 1) and not elsewhere.at_work(NOW + LOST_AFTER_S + 1)
    ended = status(host="another-machine", state="ended")
    assert not ended.lost(NOW + 1e6) and not ended.at_work(NOW)
