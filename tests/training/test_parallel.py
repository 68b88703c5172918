"""Several processes under torchrun come to the loss and the gradient of one, and none outlives the others."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import FileStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.run import config_from_args, parse_args

from benchmarks.trainer_cases import Case, made_up_batch, model_of
from entente.telemetry.errors import TrainingError
from entente.training.parallel import split_rows
from entente.training.policy import Policy
from entente.training.process import TrainerProcess, trainer_command
from entente.training.replay import replay_step
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from storage.gather import Batch
from storage.ledger import ledger_path
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.update_log import read_update_log
from tests.training.parallel_worker import CONFIG, two_updates
from tests.training.whole_step import whole_step
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "training" / "parallel_worker.py"
SETTINGS = TrainingSettings(learning_rate=1e-2, device="cpu")


# -- shares of the rows ----------------------------------------------------------------------------------------------------


def unique_tokens(batch: Batch, rows: list[int]) -> int:
    """Distinct beginnings of rows, up to the last token that a branching one follows: by a set, without a trie."""
    found = set()
    for row in rows:
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
        sizes = np.diff(batch.legal_offsets)[batch.completion_offsets[row] : batch.completion_offsets[row + 1]]
        if (sizes > 1).any():
            end = int(batch.prompt_lens[row]) + int(np.flatnonzero(sizes > 1)[-1])
            found |= {tuple(ids[:length]) for length in range(1, end + 1)}
    return len(found)


@pytest.mark.parametrize("size", [2, 3])
def test_shares_are_whole_groups_with_about_equally_many_unique_tokens(size: int):
    batch = made_up_batch(Case(positions=9, forks=4, own=30, spread=0.3), vocabulary=512)
    rows = [row for row in range(36) if row % 4 != 1]  # not all of a batch, in any order
    rows = [*rows[7:], *rows[:7]]
    cut = split_rows(batch, rows, size)
    assert len(cut) == size and sorted(row for part in cut for row in part) == sorted(rows)
    groups = [{int(batch.advantage_groups[row]) for row in part} for part in cut]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 9, "no group is split"
    tokens = [unique_tokens(batch, part) for part in cut]
    largest_group = max(unique_tokens(batch, [row for row in rows if row // 4 == group]) for group in range(9))
    assert max(tokens) <= unique_tokens(batch, rows) / size + largest_group


def test_neighbours_in_the_trie_stay_together_whatever_their_groups_are_numbered():
    """Two boards, whose groups are numbered in turn: each process takes one board, so no prompt is computed twice."""
    batch = made_up_batch(Case(positions=2, powers=4, forks=2, board=200, own=4, completion=20), vocabulary=512)
    batch.advantage_groups[:] = np.array([0, 2, 4, 6, 1, 3, 5, 7], np.int32)[batch.advantage_groups]
    rows = list(range(16))
    assert [sorted(part) for part in split_rows(batch, rows, 2)] in ([rows[:8], rows[8:]], [rows[8:], rows[:8]])


def test_rows_without_a_group_are_split_one_by_one():
    batch = made_up_batch(Case(positions=1, forks=8, own=4, completion=20), vocabulary=512)
    batch.advantage_groups[:] = -1
    assert all(split_rows(batch, range(8), 2))


# -- processes of one machine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of random weights."""
    folder = tmp_path_factory.mktemp("small")
    model_of(CONFIG).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}


def run(small: Path, folder: Path, processes: int, *runs: dict) -> list[dict]:
    """What two updates come to in so many processes, with each of these settings; the leader writes it."""
    folder.mkdir()
    *starter, _module, _name = trainer_command(processes, folder / "meeting")
    given = json.dumps([{"processes": processes} | settings for settings in runs])
    words = [*starter, str(WORKER), str(small), str(folder / "found.pt"), given]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt", weights_only=False)


def assert_same_update(alone: dict, together: dict) -> None:
    assert alone["tokens"] == together["tokens"] and len(alone["losses"]) == 2
    np.testing.assert_array_equal(alone["logprobs"][0], together["logprobs"][0])
    np.testing.assert_allclose(alone["logprobs"][1], together["logprobs"][1], rtol=0, atol=1e-5)
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    pairs = zip(alone["gradients"], together["gradients"], strict=True)
    apart = [np.linalg.norm(one - two) / np.linalg.norm(one) for one, two in pairs]
    assert apart[0] < 1e-6 and apart[1] < 1e-5, "the weights of the second update differ in their last bits already"
    for one, two in zip(alone["weights"], together["weights"], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5)  # Adam's first steps divide by gradients near 0


def test_torchrun_of_one_machine_meets_its_processes_over_a_file_and_unpickles_nothing_from_a_port(tmp_path: Path):
    config, *_ = config_from_args(parse_args(trainer_command(2, tmp_path / "meeting")[4:]))
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        **config.rdzv_configs,
    )
    _, store = create_backend(parameters)
    assert isinstance(store, FileStore) and store.path == str(tmp_path / "meeting")


@pytest.mark.system
def test_two_processes_come_to_the_update_of_one_and_a_split_base_changes_no_bit(small: Path, tmp_path: Path):
    """Five groups over two updates, so that shares are uneven, with a divergence term, several micro-batches, and
    a proximal policy, which
    need forwards without gradient."""
    given = {"importance_cap": 2.0}
    alone = two_updates(small, tmp_path / "one", given)
    whole, split = run(small, tmp_path / "two", 2, given, given | {"fsdp": True})
    assert_same_update(alone, whole)
    blocks = sum(weight.numel() for weight in model_of(CONFIG).model.layers.parameters())
    assert alone["weights_here"] == whole["weights_here"] == split["weights_here"] + blocks // 2
    assert whole["losses"] == split["losses"], "the same number of processes gives the same bits"
    for one, two in zip([*whole["gradients"], *whole["weights"]], [*split["gradients"], *split["weights"]], strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_more_processes_than_groups_come_to_the_update_of_one(small: Path, tmp_path: Path):
    settings = {"advantage_scale": "batch"}
    (more,) = run(small, tmp_path / "more", 8, settings | {"fsdp": True})
    assert_same_update(two_updates(small, tmp_path / "one", settings), more)


def weights_of(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


@contextmanager
def trainer(paths: RunPaths, model: Path, **settings: object) -> Iterator[TrainerProcess]:
    """A trainer with these settings; afterwards none of its processes is left."""
    started = TrainerProcess(paths, model, SETTINGS.model_copy(update=settings), StorageSettings(), threads=1)
    try:
        started.ready()
        family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
        yield started
    finally:
        started.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def kill_in_step(together: TrainerProcess, paths: RunPaths) -> None:
    """Kill the follower while two processes compute step 2."""
    (follower,) = (each for each in psutil.Process(together.pid).children() if each.environ()["RANK"] == "1")
    follower.suspend()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(together.step, 2, 2)
        wait_until(lambda: ledger_path(paths, 2).exists(), seconds=60)
        follower.kill()
        with pytest.raises(TrainingError) as told:
            step.result(timeout=60)
    assert str(told.value) == (
        "one of the trainer's processes exited, so torchrun stopped the others; see the last lines of "
        f"{paths.trainer_log}, and resume the run, which repeats the step"
    )
    with pytest.raises(TrainingError, match="one of the trainer's processes exited"):
        together.fresh_rows()


@pytest.mark.in_turn
@pytest.mark.system
def test_a_process_that_dies_in_a_step_is_told_in_a_sentence_and_the_step_is_repeated(run_with_rows, exact_engine, model):
    """One process that repeats the step has the weights of a run that was never broken, and says so in a replay."""

    def alone(paths: RunPaths) -> Trainer:
        return Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings())

    unbroken = alone(run_with_rows(exact_engine(), groups=4, forks=4, name="unbroken"))
    expected = [whole_step(unbroken, step, 2).published.folder for step in (1, 2)]
    paths = run_with_rows(exact_engine(), groups=4, forks=4, name="broken")
    with trainer(paths, model, processes=2) as together:
        whole_step(together, 1, 2)
        kill_in_step(together, paths)
    repeating = alone(paths)
    assert repeating.resume_point().step_done == 1
    repeated = whole_step(repeating, 2, 2).published.folder
    recorded = [read_update_log(paths, step) for step in (1, 2)]
    assert [outcome and outcome.processes for outcome in recorded] == [2, 1]
    for name, weight in weights_of(expected[1]).items():
        # A weight moves by up to 1e-2 a step, and Adam magnifies the last bits of a gradient near zero.
        torch.testing.assert_close(weights_of(repeated)[name], weight, rtol=0, atol=1e-3)
    found = replay_step(paths, 1, model, SETTINGS, StorageSettings())
    assert found.difference is None and found.tolerance.loss > 0, "one process repeats the step of two closely, not bit for bit"


# -- processes of other machines -------------------------------------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.system
def test_torchrun_elsewhere_shares_the_updates_and_ends_with_the_trainer(
    run_with_rows, exact_engine, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    words = trainer_command(1, tmp_path / "meeting")
    log = tmp_path / "elsewhere.log"
    with log.open("wb") as output:
        given = environment() | meeting | {"PET_NODE_RANK": "1"}
        agent = subprocess.Popen(words, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=tmp_path)
    try:
        paths = run_with_rows(exact_engine(), groups=4, forks=4)
        with trainer(paths, model) as together:
            whole_step(together, 1, 2)
        outcome = read_update_log(paths, 1)
        assert outcome is not None and outcome.processes == 2
        agent.wait(timeout=60)
    finally:
        agent.kill()
        agent.wait()
    # torchrun writes a traceback of its own where its peer has ended first.
    assert "entente/training/" not in log.read_text()
