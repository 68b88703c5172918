"""What a run tells processes that play for it is whole whenever it is read."""

import json
from pathlib import Path

import pytest

from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import DataError
from storage.control import ControlDesk, program_differences, program_marks, read_control
from storage.runs import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run").create()


@pytest.fixture
def desk(paths: RunPaths) -> ControlDesk:
    return ControlDesk(paths, base_model="b", plays="p", max_policy_lag=2)


def test_what_is_told_is_what_is_read(paths: RunPaths, desk: ControlDesk):
    with pytest.raises(DataError, match=r"control\.json is missing: the run has not started"):
        read_control(paths)
    desk.serve(BASE)
    assert read_control(paths).policy == BASE and read_control(paths).oldest == 0
    desk.serve(PolicyVersion(version=7, adapter=paths.adapter(7), adapter_hash="abc"))
    control = read_control(paths)
    assert (control.policy, control.oldest) == (PolicyVersion(version=7, adapter_hash="abc"), 5)
    assert (control.base_model, control.plays, control.program) == ("b", "p", program_marks())


@pytest.mark.parametrize("change", [{"version": "7"}, {"oldest": True}, {"adapter_hash": None}, {"program": "one"}], ids=str)
def test_a_control_file_that_was_altered_is_refused_with_its_name(paths: RunPaths, desk: ControlDesk, change: dict[str, object]):
    desk.serve(BASE)
    paths.control.write_text(json.dumps(json.loads(paths.control.read_text()) | change))
    with pytest.raises(DataError, match=r"control\.json is damaged.*when it resumes"):
        read_control(paths)


def test_programs_differ_where_a_mark_does():
    marks = program_marks()
    assert program_differences(marks) == ""
    assert program_differences((*marks[:-1], "package state_cache=0")).startswith("package state_cache is ")
