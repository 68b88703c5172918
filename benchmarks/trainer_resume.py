"""Compares three training steps, a new process and three more steps with six steps in one process.

    python -m benchmarks.trainer_resume RUN MODEL STEP...      train these steps of a run

Every process is a new interpreter that gets only the files of the run. The adapter and the optimiser's state in the checkpoint of
the last step are compared bit by bit.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.storage_rows import decisions_of, plies_of
from benchmarks.trainer_cases import TINY, Case, made_up_batch, model_of
from records.rows import Decision
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import TrainingError

STEPS = (1, 2, 3, 4, 5, 6)
STOP_AFTER = 3
_SHAPE = replace(TINY, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128, vocabulary=512)
_SHORT = Case(positions=len(STEPS), powers=7, forks=6, rules=20, board=20, own=20)


def resume_equal_share(folder: Path, *, stop_after: int = STOP_AFTER) -> float:
    """Share of the tensors that are bitwise equal with and without a stop; 1 if resuming is exact.

    Args:
        folder: an empty folder to work in.
    """
    disable_progress_bar()
    model_of(_SHAPE).save_pretrained(folder / "model")
    straight, stopped = folder / "straight", folder / "stopped"
    _publish_rows(RunPaths(straight).create())
    shutil.copytree(straight, stopped)
    _steps(straight, folder / "model", STEPS)
    _steps(stopped, folder / "model", STEPS[:stop_after])
    _steps(stopped, folder / "model", STEPS[stop_after:])
    one, other = (_tensors(RunPaths(run).checkpoint(STEPS[-1])) for run in (straight, stopped))
    return equal_share(one, other)


def equal_share(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Share of all tensors of `one` and `other` that both have with the same bits."""
    same = sum(
        name in other and other[name].dtype == tensor.dtype and bool(tensor.equal(other[name])) for name, tensor in one.items()
    )
    return same / len(one.keys() | other.keys())


def _publish_rows(paths: RunPaths) -> None:
    """Publish one shard of six start groups, with seven powers and six forks each."""
    batch = made_up_batch(_SHORT, vocabulary=_SHAPE.vocabulary)
    powers, forks, made = _SHORT.powers, _SHORT.forks, []
    for place, row in enumerate(decisions_of(range(_SHORT.positions), seed=0)):
        position, within = divmod(place, powers * forks)
        fork, power = divmod(within, powers)  # rows are in the order of forks, the batch in the order of powers
        made.append(_with_tokens(row, batch, (position * powers + power) * forks + fork))
    publish_shard(paths, "bench", 0, made, plies_of(range(_SHORT.positions)), {})


def _with_tokens(row: Decision, batch: Any, at: int) -> Decision:
    first, last = batch.completion_offsets[at], batch.completion_offsets[at + 1]
    bounds = batch.legal_offsets[first : last + 1]
    return replace(
        row,
        input_ids=batch.input_ids[batch.input_offsets[at] : batch.input_offsets[at + 1]],
        prompt_len=int(batch.prompt_lens[at]),
        behaviour_logprobs=batch.behaviour_logprobs[first:last],
        legal_ids=batch.legal_ids[bounds[0] : bounds[-1]],
        legal_offsets=(bounds - bounds[0]).astype("int32"),
    )


def _steps(run: Path, model: Path, steps: tuple[int, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.trainer_resume", str(run), str(model), *map(str, steps)]
    one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=os.environ | one_thread, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"the trainer of the resume check failed: {done.stderr.strip().splitlines()[-1:]}")


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """Tensors of the adapter and of the optimiser, by name."""
    from safetensors.torch import load_file

    saved = load_file(checkpoint / "trainer.safetensors")
    optimiser = {name: value for name, value in saved.items() if name.startswith("optimiser.")}
    return load_file(checkpoint / "adapter_model.safetensors") | optimiser


def main(run: Path, model: Path, steps: list[int]) -> None:
    """Train `steps` of `run`, with one start group each."""
    from storage.settings import StorageSettings
    from training.policy import Policy
    from training.settings import TrainingSettings
    from training.trainer import Trainer

    settings = TrainingSettings(learning_rate=1e-2, device="cpu", keep_checkpoints=len(STEPS))
    trainer = Trainer(RunPaths(run), Policy(model, settings), settings, StorageSettings(max_policy_lag=len(STEPS)))
    for step in steps:
        report = trainer.step(step, 1)
        if report.metrics["train/skipped"]:
            raise TrainingError(f"step {step} of the resume check trained on nothing")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(step) for step in sys.argv[3:]])
