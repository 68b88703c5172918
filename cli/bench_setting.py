"""Inputs of the benchmarks against the system before this one: settings and positions of a preset, and two tiny models."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.run_settings import CACHE_FOLDER, MODEL_FOLDER, RunSettings, layered_settings
from telemetry.progress import reporter

if TYPE_CHECKING:
    from benchmarks.old_way.arm import Setting

_FOLDER = "_bench"
"""Folder beside the runs for files that benchmarks keep."""
_LONG_GROUPS = 2
"""Start groups of a step with years or powers of its own: each has many times the decisions of the preset's."""


def run_settings(
    config: Iterable[Path] | None, *, runs_root: Path, seed: int, rollouts: Mapping[str, Any] | None = None
) -> RunSettings:
    """The laptop preset with `config` laid over it, and over that settings of `rollouts`."""
    overrides: dict[str, Any] = {"seed": seed, "runs_root": runs_root, "rollouts": rollouts or {}}
    return layered_settings("laptop", config or (), overrides)


def rollouts_of(years: int | None, powers: str | None, start_groups: int | None) -> dict[str, Any]:
    """The settings of rollouts that these options set."""
    if start_groups is None and (years, powers) != (None, None):
        start_groups = _LONG_GROUPS
    options = {"horizon_years": years, "policy_powers": powers, "start_groups": start_groups}
    return {name: value for name, value in options.items() if value is not None}


def is_short(quick: bool, years: int | None, powers: str | None) -> bool:
    """Whether these options mean one short round."""
    return quick or years is not None or powers is not None


def arguments_of(config: Iterable[Path] | None, rollouts: Mapping[str, Any]) -> list[str]:
    """Arguments of `entente train` for these config files and settings of rollouts."""
    words = [word for file in config or () for word in ("--config", str(file))]
    return [*words, *(word for name, value in rollouts.items() for word in (f"--rollouts.{name.replace('_', '-')}", str(value)))]


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


def old_way_setting(settings: RunSettings, cache: Path) -> "Setting":
    """Inputs of both systems. Missing tiny models are made, which takes some minutes."""
    from benchmarks.old_way.arm import Setting
    from benchmarks.old_way.json_prompts import make_json_model
    from state_cache.store import open_cache
    from training.tiny_model import make_tiny_model

    models = settings.runs_root / MODEL_FOLDER
    return Setting(
        compact_model=make_tiny_model(models, settings.tiny_model, prompts=settings.prompts),
        json_model=make_json_model(models, settings.tiny_model),
        positions=open_cache(cache).train,
        rollouts=settings.rollouts,
        training=settings.training,
        inference=settings.inference,
        prompts=settings.prompts,
        folder=settings.runs_root / _FOLDER,
        seed=settings.seed,
    )
