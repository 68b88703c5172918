"""Holds loss and gradient of each packed attention against padded rows: on drawn rows, and in float32 on a small model."""

import torch

from benchmarks.trainer_arms import Arms, relative_error
from benchmarks.trainer_cases import TINY
from smoke.job import Found, Job, StageFailed
from smoke.models import RANK, model_folder, shape_of
from smoke.rows import first_rows, read_rows
from smoke.training_step import CASES, Parts, free_memory, kinds_on
from storage.gather import Batch
from training.layout import TOLERANCES

ROWS = 8
"""Drawn rows that are compared."""


def run(job: Job) -> Found:
    """Differences of each kind. An attention that fails is a note as long as another one agrees."""
    model, device, parts = model_folder(job), torch.device(job.device), Parts()
    arms = Arms(shape_of(model), device, getattr(torch, job.dtype), RANK, model)
    compare(parts, arms, first_rows(read_rows(job.drawn), ROWS), "drawn")
    del arms
    free_memory()
    small = Arms(TINY, device)
    compare(parts, small, small.batch(CASES["cpu"]["three_level"]), "float32")
    allowed = TOLERANCES[job.device, job.dtype]
    kinds = kinds_on(device)
    good = [
        kind
        for kind in kinds
        if parts.figures.get(f"drawn.{kind}.loss_diff", 1.0) <= allowed.loss
        and parts.figures.get(f"drawn.{kind}.gradient_error", 1.0) <= allowed.gradient
    ]
    notes = [f"{name}: {error}" for name, error in parts.failures.items()]
    notes += [f"{kind} differs too much from padded rows" for kind in kinds if kind not in good]
    if not good:
        raise StageFailed(f"no packed attention agrees with padded rows: {'; '.join(notes)}", figures=parts.figures)
    shown = ", ".join(f"{kind} {parts.figures[f'drawn.{kind}.gradient_error']:.2g}" for kind in good)
    return Found(
        sentence=f"gradients agree with padded rows (relative difference: {shown})",
        figures=parts.figures | {f"agrees.{kind}": 1.0 for kind in good},
        notes=notes,
    )


def compare(parts: Parts, arms: Arms, batch: Batch, name: str) -> None:
    """Add the differences of every kind of attention on `batch`."""
    expected_loss, expected = arms.loss_and_gradient(arms.ours(layout="padded", micro_batch_rows=2), batch)

    def differences(kind: str) -> dict[str, float]:
        loss, gradient = arms.loss_and_gradient(arms.ours(attention=kind), batch)
        return {"loss_diff": abs(loss - expected_loss), "gradient_error": relative_error(gradient, expected)}

    for kind in kinds_on(arms.device):
        if kind != "varlen" or name != "float32":  # it is flash attention, which has no float32
            parts.add(f"{name}.{kind}", lambda kind=kind: differences(kind))
