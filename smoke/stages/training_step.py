"""Measures the training step with each attention, budget and with recomputation: time, peak memory, share of the matrix rate."""

import torch

from benchmarks.trainer_arms import Arms
from smoke.job import Found, Job, StageFailed, figures_so_far
from smoke.models import RANK, model_folder, shape_of
from smoke.training_step import BUDGETS, CASES, fastest, kinds_on, matrix_rate, measure_steps


def run(job: Job) -> Found:
    """Figures of all parts. A part that fails, as for want of memory, is a note as long as one attention works."""
    model, device = model_folder(job), torch.device(job.device)
    known = figures_so_far(job).get("card", {}).get("matrix_tflops")
    rate = 1e12 * (known or matrix_rate(device, 512)["matrix_tflops"])
    arms = Arms(shape_of(model), device, getattr(torch, job.dtype), RANK, model)
    kinds, cases = kinds_on(device), CASES[job.device]
    parts = measure_steps(arms, cases, kinds, BUDGETS[job.device], rate, 3 if job.device == "cuda" else 1)
    notes = [f"{name}: {error}" for name, error in parts.failures.items()]
    name = next(iter(cases))
    best = fastest(parts.figures, name, kinds)
    if f"{name}.{best}.step_s" not in parts.figures:
        raise StageFailed(f"no attention works: {'; '.join(notes)}", figures=parts.figures)
    found = {key.removeprefix(f"{name}.{best}."): value for key, value in parts.figures.items()}
    memory = f", {found['peak_gib']:.1f} GiB at most" if "peak_gib" in found else ""
    return Found(
        sentence=f"{best} attention trains {found['unique_tokens_per_s']:,.0f} unique tokens/s, "
        f"{found['matrix_rate_share']:.0%} of the matrix rate{memory}",
        figures=parts.figures,
        notes=notes,
    )
