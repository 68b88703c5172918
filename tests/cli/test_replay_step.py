"""`entente runs replay-step`: a real run's steps are repeated, and the exit code says whether they agree."""

import json

from storage.adapters import read_adapter
from storage.files import file_lock
from storage.update_log import update_log_path


def test_both_steps_of_a_run_made_by_another_process_come_out_again_bitwise(trained, workplace):
    """As a user has it; and the run is at work as far as its locks can tell."""
    _, paths, _ = trained
    lines = {line["step"]: line for line in map(json.loads, paths.metrics.read_text().splitlines())}
    with file_lock(paths.lock), file_lock(paths.trainer_lock):
        done = workplace("runs", "replay-step", "--run", "first", "--step", "2")
    assert done.returncode == 0, done.stderr
    about, loss, norm, adapter, verdict = done.stdout.splitlines()
    assert about == "step 2, replayed from the checkpoint of step 1" and verdict.startswith("all agree bitwise")
    figures = lines[2].get("train/loss", 0.0), lines[2].get("train/grad_norm", 0.0), read_adapter(paths, 2).adapter_hash
    for line, figure in zip((loss, norm, adapter), figures, strict=True):
        assert line.endswith(f"{figure} recorded, {figure} now")
    assert done.stderr.splitlines()[0] == "replaying step 2 from the checkpoint of step 1"


def test_a_difference_is_one_sentence_and_exit_code_1(copied, workplace):
    outcome = update_log_path(copied, 2)
    stored = json.loads(outcome.read_bytes())
    stored["updates"][-1]["micro_batches"][0] += 1e-6
    outcome.write_text(json.dumps(stored))
    done = workplace("runs", "replay-step", "--run", "copy", "--step", "2", "--runs-root", str(copied.root.parent))
    found = f"micro-batch 1 of update {len(stored['updates'])} of step 2 differs"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"entente: {found}: the loss was recorded as ")
