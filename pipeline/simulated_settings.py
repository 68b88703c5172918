"""Settings of simulated rollouts: start groups of an earlier run are published again at a given rate instead of being played."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from telemetry.setting_marks import MAY_CHANGE

LEARNING_RATE_MAX = 1e-9
"""Highest allowed learning rate. Up to it, float32 weights do not change in thousands of steps."""


class SimulatedSettings(BaseModel):
    """Simulated rollouts, to measure everything except the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    from_run: str = ""
    """Name of an earlier run under `runs_root` whose start groups are published again, without an engine; empty: no simulation.
    The rows are of the base model, so training.learning_rate must be close to 0."""
    rate: Annotated[float, MAY_CHANGE, Field(gt=0)] = 1.0
    """Start groups per second, at most."""
    latency_s: Annotated[float, MAY_CHANGE, Field(ge=0)] = 0.0
    """Seconds per start group: the minimum, or the median with a heavy tail; many are in flight at once."""
    tail: Annotated[Literal["fixed", "heavy"], MAY_CHANGE] = "fixed"
    """'fixed': equal latencies; 'heavy': one in ten is 3 times the median or more, one in a hundred 13 times."""
