"""What is damaged is named, set aside and counted, and the run goes on where it can."""

import json
import shutil
from pathlib import Path

import pytest

from storage.runs import RunPaths
from tests.damage import flip


@pytest.fixture
def copy(workplace, trained, tmp_path: Path) -> RunPaths:
    """The trained run and its state cache, to be damaged."""
    shutil.copytree(workplace.folder / "runs" / "_state_cache", tmp_path / "_state_cache")
    (tmp_path / "_models").symlink_to(workplace.folder / "runs" / "_models")
    shutil.copytree(trained[1].root, tmp_path / "first")
    return RunPaths(tmp_path / "first")


@pytest.mark.system
@pytest.mark.in_turn
def test_a_run_mends_a_damaged_cache_checkpoint_adapter_and_score_and_learns_the_same(workplace, trained, copy: RunPaths):
    """The newest checkpoint is gone, so its step is repeated from its ledger, to the last bit."""
    (cache,) = copy.root.parent.glob("_state_cache/v-*")
    damaged = [
        flip(cache / "train.arrow"),
        flip(copy.checkpoint(2) / "trainer.safetensors"),
        flip(copy.adapter(1) / "adapter_model.safetensors"),
        flip(copy.scores / "base.json"),
    ]
    (copy.scores / "base.json").write_text("no score")
    done = workplace.process("train", "--runs-root", str(copy.root.parent), "--run", "first", "--resume", "--steps", "3")
    assert done.returncode == 0, done.stderr
    for file in (damaged[0], damaged[1], damaged[3]):
        assert any("set aside" in line and str(file) in line for line in done.stderr.splitlines()), file
    kept = [path for path in copy.root.parent.rglob(".*.damaged-*") if path.parent.parent != path]
    assert len(kept) == len(damaged), "each damaged thing was kept under another name"
    weights = [
        [(paths.adapter(version) / "adapter_model.safetensors").read_bytes() for version in (1, 2)]
        for paths in (copy, trained[1])
    ]
    assert weights[0] == weights[1] and copy.adapter(3).is_dir()
    lines = [json.loads(line) for line in copy.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]


def test_what_nothing_can_replace_is_said_with_the_file_s_name(workplace, trained, copy: RunPaths):
    copy.settings.write_text(copy.settings.read_text().replace('"steps"', '"stepz"'))
    done = workplace("train", "--runs-root", str(copy.root.parent), "--run", "first", "--resume", "--steps", "3")
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("entente: ") and "settings.json" in sentence and "Traceback" not in done.stderr


def test_a_resume_is_refused_before_it_starts_where_a_lost_ledger_has_no_copy(workplace, trained, copy: RunPaths):
    for file in copy.root.rglob("step-000002.arrow"):
        file.unlink()
    done = workplace("train", "--runs-root", str(copy.root.parent), "--run", "first", "--resume", "--steps", "3", "--dry-run")
    assert done.returncode == 1 and "the ledger of step 2 is needed" in done.stderr.splitlines()[-1]
