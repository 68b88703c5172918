"""Settings of simulated rollouts: start groups of an earlier run are published again at a given rate instead of being played."""

from typing import Annotated

from pydantic import Field

from telemetry.setting_marks import MAY_CHANGE, Settings

LEARNING_RATE_MAX = 1e-9
"""Highest allowed learning rate. Up to it, float32 weights do not change in thousands of steps."""


class SimulatedSettings(Settings):
    """Simulated rollouts, to measure everything except the engine."""

    from_run: str = ""
    """Name of an earlier run under `runs_root` whose start groups are published again, without an engine; empty: no simulation.
    The rows are of the base model, so training.learning_rate must be close to 0."""
    rate: Annotated[float, MAY_CHANGE, Field(gt=0)] = 1.0
    """Start groups per second, at most."""
