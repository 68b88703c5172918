"""A run of the laptop preset as the input of benchmarks: its settings, its positions, and the rows of one of its steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.entente_run import short_run
from entente.settings.run_settings import RunSettings, layered_settings
from entente.telemetry.errors import TrainingError
from entente.telemetry.progress import reporter
from entente.training.objective import advantages_of
from storage.gather import Batch
from storage.index import open_index
from storage.ledger import last_step, read_ledger
from storage.runs import CACHE_FOLDER

STEPS = 3
"""Steps of a recorded run; the rows are those of the last one."""


def run_settings(config: Iterable[Path] | None, *, runs_root: Path, seed: int, preset: str = "laptop") -> RunSettings:
    """The preset with `config` laid over it."""
    return layered_settings(preset, config or (), {"seed": seed, "runs_root": runs_root})


def cache_of(settings: RunSettings) -> Path:
    """Folder of the positions of these settings; built now if missing."""
    from state_cache.build import build
    from state_cache.store import find_cache, write_cache

    root = settings.runs_root / CACHE_FOLDER
    found = find_cache(root, settings.cache)
    if found is not None:
        return found
    train, held_out = build(settings.cache, lambda done, wanted: reporter().stage("positions", done, wanted))
    return write_cache(root, settings.cache, train, held_out)


def record_rows(settings: RunSettings, arguments: Sequence[str]) -> tuple[Batch, np.ndarray]:
    """Train STEPS steps with these settings, and return the rows of the last one with their advantages, float32 [rows].

    Args:
        arguments: arguments of `entente train` that give it `settings`.

    Raises:
        TrainingError: the run failed, or its last step had nothing to train on.
    """
    with short_run(settings, arguments, STEPS) as (_, paths):
        index = open_index(paths, blend=settings.storage.blend, discount=settings.storage.discount)
        rows = read_ledger(paths, last_step(paths))
        if rows is None or not rows.num_rows:
            raise TrainingError("the last step of the recorded run had no rows: give another --seed")
        batch = index.gather(rows)
        return batch, advantages_of(batch.returns, batch.advantage_groups, settings.training)
