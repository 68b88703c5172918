"""`entente runs replay-step`: replay a past step, and compare it with its record."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from entente.cli.options import AT_LEAST_1, Run, RunsRoot, which_run
from entente.settings.check_settings import check_objective
from entente.settings.find_model import model_of
from entente.settings.layers import settings_of
from entente.telemetry.errors import TrainingError
from entente.telemetry.machine import apply_threads, usable_cores
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from entente.settings.run_settings import RunSettings
    from entente.training.replay import Replay
    from entente.training.settings import TrainingSettings


def replay_step(
    *,
    step: Annotated[int, Parameter(help="The step to replay, counted from 1.", validator=AT_LEAST_1)],
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
) -> None:
    """Run a past step again from its ledger, checkpoint and shards, and compare loss, gradient norm and adapter.

    On a CPU they must agree bitwise, on a GPU within a tolerance. Steps since the nearest kept checkpoint are replayed too. The
    run is not changed, and may be training. Exits with 0 if all agree; else reports the first difference and exits with 1.

    Example

        entente runs replay-step --run mine --step 7
    """
    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    settings = settings_of(paths)
    check_objective(settings)
    model = model_of(settings, runs_root, run)
    apply_threads(usable_cores())
    from entente.cli.terminal import show_progress
    from entente.training.replay import replay_step as replay

    training = _training(settings)
    with show_progress():
        comparison = replay(paths, step, model, training, settings.storage)
    for line in _lines(comparison):
        print(line)
    if comparison.difference:
        raise TrainingError(_sentence(comparison))


def _training(settings: "RunSettings") -> "TrainingSettings":
    from entente.training.policy import choose_device

    training = settings.training
    on_cpu = choose_device(training.device).type == "cpu"  # where flex has no gradient
    return training.model_copy(update={"seed": settings.seed, "attention": "ranges" if on_cpu else training.attention})


def _lines(replay: "Replay") -> list[str]:
    start = f"the checkpoint of step {replay.start}" if replay.start else "the first weights"
    recorded, replayed = replay.recorded, replay.replayed
    lines = [f"step {replay.step}, replayed from {start}"]
    if replayed is not None:
        lines += [
            f"loss           {recorded.loss!r} recorded, {replayed.loss!r} now",
            f"gradient norm  {recorded.grad_norm!r} recorded, {replayed.grad_norm!r} now",
            f"adapter        {recorded.adapter_hash} recorded, {replayed.adapter_hash} now",
        ]
    if replay.difference is None:
        from entente.evaluation.intervals import format_count

        count = sum(len(update.micro_batches) for update in recorded.updates)
        micro_batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        allowed = f"within {replay.tolerance}" if replay.tolerance.loss else "bitwise"
        lines += [f"all agree {allowed}, over {micro_batches} in {format_count(len(recorded.updates), 'updates')}"]
    return lines


def _sentence(replay: "Replay") -> str:
    sentence = "" if replay.difference is None else replay.difference.sentence
    if replay.recorded.torch != replay.torch:
        sentence += f"; torch was {replay.recorded.torch} then and is {replay.torch} now"
    elif replay.difference is not None:
        sentence += "; another version of Entente may round the last bits differently"
    return sentence
