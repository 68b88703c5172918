"""Computes drawn rows again as the trainer does, and holds the difference to the engine against the product's own bounds."""

from smoke.job import Found, Job, StageFailed
from smoke.models import model_folder
from smoke.rows import read_rows
from telemetry.errors import TrainingError
from training.mismatch import check_mismatch, measure_mismatch
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater


def run(job: Job) -> Found:
    """Mean, 99th percentile and largest difference."""
    settings = TrainingSettings(dtype=job.dtype, device=job.device)
    updater = Updater(Policy(model_folder(job), settings), settings)
    found = measure_mismatch(updater, read_rows(job.drawn))
    figures = {"mean_nats": found.mean, "p99_nats": found.p99, "largest_nats": found.largest, "tokens": found.tokens}
    try:
        check_mismatch(found, 0, settings)
    except TrainingError as error:
        raise StageFailed(str(error), figures=figures) from error
    layout = "packed" if updater.layout.packed else "padded"
    return Found(
        sentence=f"trainer ({layout}) and engine differ over {found.tokens} tokens by {found.mean:.2g} nats on average, "
        f"{found.p99:.2g} at the 99th percentile, {found.largest:.2g} at most",
        figures=figures,
        notes=[updater.layout.fallback] if updater.layout.fallback else [],
    )
