"""Decides when a run compares trainer and engine, and on which rows.

Before its first step a run refuses to train unless both give the same probabilities to rows of the version that both hold.
Without a buffer, every later step measures the mismatch on its own rows. With a buffer, every `COMPARE_EVERY`-th does.
"""

from entente.pipeline.resources import Resources
from entente.pipeline.rollout_queue import RolloutQueue
from entente.pipeline.run_settings import RunSettings
from tasks.quoted import quoted
from tasks.rollouts import roll_out_probe
from tasks.training import check_mismatch, has_fresh_rows

COMPARE_EVERY = 20
"""Steps between two comparisons, which may wait for rollouts in flight."""


async def check_agreement(resources: Resources, queue: RolloutQueue, settings: RunSettings, step: int) -> dict[str, float]:
    """Compare trainer and engine before `step` if a comparison is due. Returns the mismatch as metrics, else nothing.

    Raises:
        TrainingError: they differ by more than the settings allow.
    """
    begins = step == resources.resume_point.step_done + 1
    if not begins and not (settings.pipeline.buffer_depth and step % COMPARE_EVERY == 0):
        return {}
    if not await has_fresh_rows(resources):
        if not begins and not queue.in_step:
            return {}  # rollouts in flight are not stopped for a comparison
        # Rollouts ran ahead: no published row was drawn by the trainer's version.
        await queue.all_played()
    if not await has_fresh_rows(resources):
        await roll_out_probe(quoted(resources), step - 1)
    return await check_mismatch(quoted(resources))
