"""Several processes come to the loss and the gradient of one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.trainer_cases import Case, made_up_batch
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import TrainingError
from training.parallel import join_peers, split_rows
from training.process import TrainerProcess
from training.settings import TrainingSettings

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "training" / "parallel_worker.py"


def run(command: list[str], file: Path) -> dict:
    """What the leader of these processes wrote."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, str(WORKER), str(file)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return torch.load(file, weights_only=False)


@pytest.mark.slow
def test_two_processes_under_torchrun_come_to_the_loss_the_gradient_and_the_weights_of_one(tmp_path: Path):
    """Five groups over two updates, so that shares are uneven; with a divergence term and several micro-batches."""
    alone = run([sys.executable], tmp_path / "one.pt")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = run(torchrun, tmp_path / "two.pt")
    assert alone["tokens"] == together["tokens"] and len(alone["losses"]) == 2
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    for one, two in zip(alone["gradients"], together["gradients"], strict=True):
        assert np.linalg.norm(one - two) < 1e-6 * np.linalg.norm(one)
    for one, two in zip(alone["weights"], together["weights"], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5)  # Adam's first steps divide by gradients near 0


def test_a_process_that_is_alone_has_no_peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_peers(torch.device("cpu")) is None


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_whole_groups_of_neighbours_and_about_equal(size: int):
    batch = made_up_batch(Case(positions=9, forks=4, own=30, spread=0.3), vocabulary=512)
    rows = [row for row in range(36) if row % 4 != 1]  # not all of a batch, in any order
    rows = [*rows[7:], *rows[:7]]
    cut = split_rows(batch, rows, size)
    assert len(cut) == size and sorted(row for part in cut for row in part) == sorted(rows)
    groups = [sorted({int(batch.advantage_groups[row]) for row in part}) for part in cut]
    assert [group for part in groups for group in part] == list(range(9))  # none split, neighbours together
    tokens = [sum(int(np.diff(batch.input_offsets)[row]) for row in part) for part in cut]
    most_of_a_group = max(np.bincount(batch.advantage_groups, weights=np.diff(batch.input_offsets)))
    assert max(tokens) - min(tokens) <= 2 * most_of_a_group


def test_no_rows_leave_every_process_idle():
    assert split_rows(made_up_batch(Case(positions=1, forks=2, own=4), vocabulary=64), [], 3) == [[], [], []]


@pytest.mark.slow
def test_a_trainer_with_a_follower_trains_as_alone_resumes_and_leaves_no_process(run_with_rows, exact_engine, model):
    """Two steps by two processes, the second by new ones, against two steps by one."""
    settings = TrainingSettings(learning_rate=1e-2, device="cpu")
    weights = {}
    for processes in (1, 2):
        paths = run_with_rows(exact_engine(), groups=4, forks=4, name=f"with-{processes}")
        for step in (1, 2):
            trainer = TrainerProcess(
                paths, model, settings.model_copy(update={"processes": processes}), StorageSettings(), threads=1
            )
            try:
                assert trainer.ready().step_done == step - 1
                family = [trainer.pid, *(child.pid for child in psutil.Process(trainer.pid).children())]
                assert len(family) == processes
                adapter = trainer.step(step, 2).published
            finally:
                trainer.close()
            _, alive = psutil.wait_procs([psutil.Process(pid) for pid in family if psutil.pid_exists(pid)], timeout=10)
            assert not alive
        weights[processes] = load_file(adapter.folder / "adapter_model.safetensors")
    for name, one in weights[1].items():
        torch.testing.assert_close(one, weights[2][name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_follower_that_dies_ends_its_trainer(model, tmp_path: Path):
    settings = TrainingSettings(device="cpu", processes=2)
    paths = RunPaths(tmp_path / "run").create()
    trainer = TrainerProcess(paths, model, settings, StorageSettings(), threads=1)
    try:
        trainer.ready()
        psutil.Process(trainer.pid).children()[0].kill()
        with pytest.raises(TrainingError, match="exit code 1"):
            while True:
                trainer.fresh_rows()
        assert "follower 1 of the trainer ended with exit code -9" in paths.trainer_log.read_text()
    finally:
        trainer.close()
