"""What a run tells processes that play for it is whole whenever it is read."""

import json
import sys
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import DataError
from storage.control import ControlDesk, edited_since, program_differences, program_marks, read_control, source_hash
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


def test_a_package_that_was_edited_since_it_was_loaded_is_named_with_what_a_trainer_loads_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a reward between two runs of a notebook: the second was recorded with the hash of the first."""
    package = tmp_path / "odd_reward.py"
    package.write_text("# as it was loaded")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {name: source_hash(name) for name in ("odd_reward", "state_cache")}
    assert edited_since(sources) == {}
    package.write_text("# edited")
    assert sources["odd_reward"] == source_hash("odd_reward"), "this process keeps what it loaded"
    assert edited_since(sources).keys() == {"odd_reward"}
    source_hash.cache_clear()
    assert edited_since(sources) == {"odd_reward": source_hash("odd_reward")}


def test_a_module_that_was_imported_and_edited_before_its_hash_was_taken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = tmp_path / "odd_imported.py"
    module.write_text("class Bot:\n    def order(self):\n        return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "odd_imported.former_name", import_module("odd_imported"))
    assert edited_since({"odd_imported": source_hash("odd_imported"), "storage": source_hash("storage")}) == {}
    source_hash.cache_clear()
    module.write_text("class Bot:\n    def order(self):\n        return 1000\n")
    assert edited_since({"odd_imported": source_hash("odd_imported")}).keys() == {"odd_imported"}


def test_a_package_in_a_wheel_or_with_a_linked_folder_has_the_hash_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hashes, parts, package = [], tmp_path / "parts", tmp_path / "odd_linked"
    for folder in (parts, package):
        folder.mkdir()
    (package / "__init__.py").touch()
    (package / "bots").symlink_to(parts)
    (parts / "loop").symlink_to(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    for content in ("1", "2"):
        (parts / "mine.py").write_text(content)
        with ZipFile(tmp_path / f"{content}.whl", "w") as wheel:
            wheel.writestr(f"odd_wheel_{content}/__init__.py", content)
            wheel.writestr(f"odd_module_{content}.py", content)
        monkeypatch.syspath_prepend(str(tmp_path / f"{content}.whl"))
        source_hash.cache_clear()
        hashes += [source_hash(name) for name in ("odd_linked", f"odd_wheel_{content}", f"odd_module_{content}")]
    assert hashes[0] != hashes[3] and hashes[1] != hashes[4] and hashes[2] != hashes[5]
