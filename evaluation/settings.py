"""Settings of evaluation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class EvaluationSettings(BaseModel):
    """How strength is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    positions: Annotated[int, Field(ge=1)] = 112
    """Held-out positions, from games that training never starts from."""
    powers_per_position: Annotated[int, Field(ge=1, le=7)] = 3
    """Powers tried on each position, one at a time."""
    horizon_years: Annotated[int, Field(ge=1, le=20)] = 1
    """Game years played from each position."""
    opponents: tuple[str, ...] = ("random", "mover")
    """Scripted players of the other powers; the first gives the score, the others stand beside it."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples of the 95 % interval, clustered by source game."""
    seed: int = 1000
    """Seed of positions, opponents' dice and draws; the same for every player compared."""
