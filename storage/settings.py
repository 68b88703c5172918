"""Settings of storage: what a return is made of, and how old a row may be when it is trained on."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from storage.schema import COMPONENTS


class StorageSettings(BaseModel):
    """How stored outcomes become returns, and which rows are still fresh."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    blend: dict[str, float] = Field(default_factory=lambda: {"centres_gained": 1.0})
    """Weight of each reward component (`storage/schema.py` names them) in a return; those not named weigh 0."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor per later decision of the same power in the fork; 1 counts all fully; the horizon is short."""
    max_policy_lag: Annotated[int, Field(ge=0)] = 2
    """Policy versions that a group's oldest row may lie behind the trainer; others allow 2 to 4."""

    @field_validator("blend")
    @classmethod
    def _known_components(cls, blend: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(blend) - set(COMPONENTS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no reward component; known are {', '.join(COMPONENTS)}")
        if not any(blend.values()):
            raise ValueError("every component weighs 0, so all returns are 0; give at least one a weight")
        return blend
