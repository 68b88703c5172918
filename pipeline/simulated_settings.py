"""Settings of simulated rollouts: start groups of an earlier run, replayed at a set rate instead of being played."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from telemetry.setting_marks import MAY_CHANGE

LEARNING_RATE_MAX = 1e-9
"""Highest learning rate under which float32 weights of a model stay as they are for thousands of steps."""


class SimulatedSettings(BaseModel):
    """Rollouts that are replayed: to measure everything but the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    from_run: str = ""
    """Name of an earlier run beside this one, whose start groups are published again instead of any being played, without an
    engine; empty: rollouts are real. Their rows are the base's, so training.learning_rate must leave it as it is."""
    rate: Annotated[float, MAY_CHANGE, Field(gt=0)] = 1.0
    """Start groups a second that come at most, as many as an engine of that speed would play."""
    latency_s: Annotated[float, MAY_CHANGE, Field(ge=0)] = 0.0
    """Seconds that a start group takes at least, from being begun: half of them do where the tail is heavy. Many are under way at
    once."""
    tail: Annotated[Literal["fixed", "heavy"], MAY_CHANGE] = "fixed"
    """fixed: all take as long; heavy: one in ten takes three times the median and more, one in a hundred thirteen times."""
