"""Names of flow runs on Prefect's pages, made from their unchecked parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run


def training_name() -> str:
    """`train-mine`. A run without a name shows model and seed until it has one."""
    settings = _given("settings", {})
    model, seed = _of(_of(settings, "inference", {}), "model", "tiny"), _of(settings, "seed", 0)
    return f"train-{_of(settings, 'run', '') or f'{Path(model).name.lower()}-seed{seed}'}"


def cache_name() -> str:
    """`cache-seed0-500`: seed and number of training positions."""
    settings = _given("settings", {})
    return f"cache-seed{_of(settings, 'seed', 0)}-{_of(settings, 'train_snapshots', 'default')}"


def evaluation_name() -> str:
    """`evaluate-mine-v20`, `evaluate-mine-newest`, or `evaluate-players` without a run."""
    if not _given("run", ""):
        return "evaluate-players"
    version = int(_given("version", -1))
    return f"evaluate-{_given('run', '')}-{'newest' if version == -1 else f'v{version}'}"


def improvement_name() -> str:
    """`improve-mine`."""
    return f"improve-{_given('run', '')}"


def sweep_name() -> str:
    """`sweep-rates`."""
    return f"sweep-{_of(_given('sweep', {}), 'name', '')}"


def recovery_name() -> str:
    """`recover-1b2c3d4e`, with the first 8 characters of the flow run's id, or `recover-all`."""
    return f"recover-{str(_given('flow_run_id', ''))[:8] or 'all'}"


def benchmark_name() -> str:
    """`benchmark-game`."""
    return f"benchmark-{_given('name', 'game')}"


def tuning_name() -> str:
    """`tune-mine`."""
    return f"tune-{_given('run', 'newest')}"


def _given(name: str, otherwise: Any) -> Any:
    value = flow_run.parameters.get(name)
    return otherwise if value is None else value


def _of(settings: Any, name: str, otherwise: Any) -> Any:
    """A setting of a settings object, or of the plain mapping that a page or a schedule sends."""
    value = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
    return otherwise if value is None else value
