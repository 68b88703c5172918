"""Inputs of benchmarks from a run: its model, its positions, and the rows of one step."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.entente_run import short_run
from entente.decoding.model_files import resolve_model
from entente.settings.find_model import TINY
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import TrainingError
from entente.telemetry.progress import reporter
from entente.training.advantages import advantages_of
from entente.training.tiny_model import make_tiny_model
from state_cache.build import build
from state_cache.store import StateCache, find_cache, open_cache, write_cache
from storage.gather import Batch
from storage.index import open_index
from storage.ledger import last_step, read_ledger
from storage.runs import CACHE_FOLDER, MODEL_FOLDER

STEPS = 3


def model_of(settings: RunSettings) -> Path:
    """Folder of the model; makes the tiny model if it is missing."""
    if settings.inference.model == TINY:
        return make_tiny_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model, prompts=settings.prompts)
    return resolve_model(settings.inference.model)


def cache_of(settings: RunSettings) -> StateCache:
    root = settings.runs_root / CACHE_FOLDER
    folder = find_cache(root, settings.cache)
    if folder is None:
        train, held_out = build(settings.cache, lambda done, wanted: reporter().stage("positions", done, wanted))
        folder = write_cache(root, settings.cache, train, held_out)
    return open_cache(folder, settings.cache)


def record_rows(settings: RunSettings, arguments: Sequence[str]) -> tuple[Batch, np.ndarray]:
    """Train STEPS steps; returns the last one's rows and advantages, float32 [rows]. Raises TrainingError on failure."""
    with short_run(settings, arguments, STEPS) as (_, paths):
        index = open_index(paths, settings.storage)
        rows = read_ledger(paths, last_step(paths))
        if rows is None or not rows.num_rows:
            raise TrainingError("the last step of the recorded run had no rows: choose another --seed")
        batch = index.gather(rows)
        return batch, advantages_of(batch.returns, batch.advantage_groups, settings.training)
