"""The trainer's own process: it answers, it tells errors as sentences, and it never outlives its parent."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, get_type_hints

import psutil
import pytest

from entente.records.policy_version import BASE, PolicyVersion, TrainedStep
from entente.telemetry.errors import DiskFullError, InputError, TrainingError
from entente.training import process
from entente.training.process import TrainerProcess
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from storage.adapters import read_adapter
from storage.files import file_lock
from storage.ledger import Eligible, count_run
from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=8, lora_alpha=16)


OPERATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "fresh_rows": ({}, 3),
    "eligible": ({"step": 2, "start_groups": 8}, Eligible(start_groups=8, advantage_groups=20, expired=1)),
    "retire": ({"settings": RetentionSettings()}, 2**40),
    "measure_mismatch": ({"begins": True}, {"mismatch/largest": 1e-6}),
    "step": ({"step": 2, "start_groups": 8}, {"train/loss": 0.1 + 0.2}),
}
"""Arguments and a result of each."""
SECOND = PolicyVersion(version=2, adapter_hash="ab" * 16, adapter=Path("/runs/a/adapters/v000002"))


def test_every_operation_reaches_the_trainer_and_its_result_comes_back_whole(tmp_path, monkeypatch):
    """Both ends in this process: the child is a thread, and the trainer a double."""
    assert set(OPERATIONS) == set(process._ARGUMENTS)
    for name in OPERATIONS:
        assert get_type_hints(getattr(Trainer, name)) == get_type_hints(getattr(TrainerProcess, name)), name
    calls = []

    class Double:
        saving = Future[PolicyVersion]()

        def resume_point(self) -> TrainedStep:
            return TrainedStep(published=BASE, metrics={}, set_aside=("step 4 is damaged",))

        def __getattr__(self, name: str) -> Any:
            return lambda **arguments: calls.append((name, arguments)) or OPERATIONS[name][1]

    def serve(stdin: int) -> None:
        with process.socket.socket(fileno=stdin) as connection:
            process._serve(connection, None)

    def start(_: object, stdin: int, **__: object) -> Any:
        thread = Thread(target=serve, args=(os.dup(stdin),))
        thread.start()
        return SimpleNamespace(pid=0, wait=lambda timeout=None: thread.join(timeout))

    monkeypatch.setattr(process.subprocess, "Popen", start)
    monkeypatch.setattr(process, "_open", lambda *_: Double())
    trainer = TrainerProcess(RunPaths(tmp_path / "run").create(), tmp_path, SETTINGS, StorageSettings(), threads=1)
    try:
        opened = trainer.ready()
        assert opened.set_aside == ("step 4 is damaged",) and opened.step_done == 0 and opened.published.adapter is None
        for name, (arguments, result) in OPERATIONS.items():
            assert getattr(trainer, name)(**arguments) == result and calls[-1] == (name, arguments)
        with ThreadPoolExecutor() as threads:
            saved = threads.submit(trainer.saved)
            assert trainer.fresh_rows() == 3 and not saved.done(), "other operations are answered while a step is published"
            Double.saving.set_result(SECOND)
            assert (published := saved.result(timeout=10)) == SECOND and published.folder == SECOND.folder
        Double.saving = Future()
        assert trainer.step(3, 8) == {"train/loss": 0.1 + 0.2} and calls[-1] == ("step", {"step": 3, "start_groups": 8})
        Double.saving.set_exception(OSError(errno.ENOSPC, "No space left on device", "/runs/a"))
        with pytest.raises(DiskFullError, match="no space is left on the disk for"):
            trainer.saved()
    finally:
        trainer.close()


@pytest.mark.system
def test_one_process_trains_tells_errors_as_sentences_and_is_ended_where_it_hangs(exact_run, model, tmp_path):
    """One process for all three: it takes far longer to start than to do any of them."""
    paths = exact_run(tmp_path / "run", groups=2, forks=3)
    trainer = TrainerProcess(paths, model, SETTINGS, StorageSettings(max_policy_lag=0), threads=1)
    try:
        assert trainer.ready().step_done == 0
        assert trainer.measure_mismatch(begins=True)["mismatch/largest"] < 1e-4
        assert trainer.step(1, 2)["train/decisions"] > 0
        published = trainer.saved()
        assert published == read_adapter(paths, 1) and published.adapter == paths.adapter(1)
        with pytest.raises(TrainingError, match="step 5 cannot be trained: the next step is 2"):
            trainer.step(5, 2)

        trainer.step(2, 2)
        assert count_run(paths).decisions > 0
        trainer.step(3, 2)

        trainer._answers_within_s = 0.5
        os.kill(trainer.pid, signal.SIGSTOP)
        with pytest.raises(TrainingError, match=r"did not answer within 0\.5 s and was killed"):
            trainer.fresh_rows()
        assert not psutil.pid_exists(trainer.pid) or psutil.Process(trainer.pid).status() == psutil.STATUS_ZOMBIE
    finally:
        trainer.close()
    assert not psutil.pid_exists(trainer.pid)


@pytest.mark.system
def test_two_trainers_of_one_run_exclude_each_other_and_one_that_dies_is_reported_with_where_to_look(
    model, tmp_path, monkeypatch
):
    paths = RunPaths(tmp_path / "run").create()
    first = TrainerProcess(paths, model, SETTINGS, StorageSettings(), threads=1)
    try:
        first.ready()
        with file_lock(paths.trainer_lock) as free:
            assert not free, "the kernel holds it for the first"
        monkeypatch.setattr(process, "_FORMER_TRAINER_S", 0.2)
        with ExitStack() as stack, pytest.raises(InputError, match="another trainer works on run 'run'"):
            process._open({"run": str(paths.root)}, stack)
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # a zombie's other threads may hold the lock a moment longer
        with file_lock(paths.trainer_lock) as free:
            assert free, "it ends with its process"
        with pytest.raises(TrainingError, match=r"exit code -9.*trainer\.log"):
            first.step(1, 1)
    finally:
        first.close()  # what could not be sent is not tried again, which would be another error


@pytest.mark.parametrize("what", ["entente", "the base model"])
def test_a_process_of_another_machine_with_another_program_or_base_is_refused(model, tmp_path, what: str):
    """It would compute its part of each gradient otherwise, and nothing would show that."""

    def gather(ours: dict[str, str]) -> list[dict[str, str]]:
        beside = {name: mark for name, mark in ours.items() if name != "the base model"}  # one process hashes for its machine
        return [ours, beside, {**ours, what: "00000000"}]

    peers: Any = SimpleNamespace(leads=True, local_rank=0, broadcast=lambda _: None, gather=gather)
    opening = {"run": str(tmp_path / "run"), "model": str(model), "training": {"processes": 2}}
    with ExitStack() as stack, pytest.raises(InputError, match=f"process 2 of the trainer has another version of {what}: put"):
        process._open(opening, stack, peers)


@pytest.mark.system
def test_closing_ends_a_stopped_trainer_that_a_thread_waits_for(model, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_ENDS_WITHIN_S", 0.5)
    trainer = TrainerProcess(RunPaths(tmp_path / "run").create(), model, SETTINGS, StorageSettings(), threads=1)
    os.kill(trainer.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(trainer.ready)
        try:
            time.sleep(0.2)  # by then the thread reads
            closing = threads.submit(trainer.close)
            closing.result(timeout=10)
            with pytest.raises(TrainingError, match="the trainer process exited"):
                waiting.result(timeout=10)
        finally:
            if psutil.pid_exists(trainer.pid):
                os.kill(trainer.pid, signal.SIGKILL)
    assert not psutil.pid_exists(trainer.pid)


@pytest.mark.in_turn
@pytest.mark.system
def test_it_ends_when_its_parent_is_killed_under_torchrun_too(model, tmp_path):
    """A trainer alone does so where whole runs are killed."""
    program = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from storage.runs import RunPaths
        from storage.settings import StorageSettings
        from entente.training.process import TrainerProcess
        from entente.training.settings import TrainingSettings
        paths = RunPaths(Path({str(tmp_path / "run")!r})).create()
        two = TrainerProcess(paths, Path({str(model)!r}), TrainingSettings(processes=2), StorageSettings(), 1)
        two.ready()
        print(two.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    torchrun = psutil.Process(int(parent.stdout.readline()))
    family = [torchrun, *torchrun.children(recursive=True)]
    assert len(family) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "the trainer outlives its parent"
