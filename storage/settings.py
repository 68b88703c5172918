"""Settings of storage: what a return is made of, and how old a row may be when it is trained on."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

BLENDS: dict[str, dict[str, float]] = {
    "centres": {"centres_gained": 1.0},
    "sum_of_squares": {"sos_share": 1.0},
    "draw_size": {"draw_share": 1.0},
    "dense": {
        "centres_gained": 1.6,
        "units_dislodged": 0.4,
        "units_driven_out": -0.4,
        "final_centres_gained": 0.4,
        "final_leader_gap": 0.3,
        "final_balance": 0.2,
    },
}
"""Blends by name. "dense" weighs as the system before this one did: 0.8 of two points a centre and half a point a
dislodgement as they come (meant for discount 0), 0.2 of the final centres, and the final board's leader gap and
balance; without its terms for units, influence and threats, which follow from centres, and its bonus for rank."""


class StorageSettings(BaseModel):
    """How stored outcomes become returns, and which rows are still fresh."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    blend: dict[str, float] = Field(default_factory=lambda: {"centres_gained": 1.0})
    """Weight of each reward component in a return; those not named weigh 0. `final_` before a component weighs its whole sum
    to the fork's end, undiscounted. A name stands for a ready blend: centres, sum_of_squares, draw_size or dense."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor per later decision of the same power in the fork; 1 counts all fully; the horizon is short."""
    max_policy_lag: Annotated[int, Field(ge=0)] = 2
    """Policy versions that a group's oldest row may lie behind the trainer; others allow 2 to 4."""
    hard_policy_lag: Annotated[int, Field(ge=0)] = 0
    """Versions back to which a step reaches, one by one, where it finds too few rows within `max_policy_lag`; if that is no
    less: it never does, and trains on fewer rows instead."""
    shortage_wait_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a step waits for more rows before it reaches back or trains on fewer; 0 where none can come but its own
    rollouts, which are there before it begins."""
    max_uses: Annotated[int, Field(ge=1)] = 1
    """Steps that may train on the same advantage group; more learn faster from a rollout, further from what drew it."""
    draw: Literal["start_group", "advantage_group"] = "start_group"
    """What a step draws where more is fresh than it wants: whole start groups, whose rows share boards and so much of their
    prompts; or single advantage groups, as many as so many start groups hold on average, which balances powers more finely."""

    @field_validator("blend", mode="before")
    @classmethod
    def _by_name(cls, blend: Any) -> Any:
        if isinstance(blend, str):
            if blend not in BLENDS:
                raise ValueError(f"there is no blend {blend!r}; named ones are {', '.join(BLENDS)}")
            return dict(BLENDS[blend])
        return blend

    @field_validator("blend")
    @classmethod
    def _some_weight(cls, blend: dict[str, float]) -> dict[str, float]:
        if not any(blend.values()):
            raise ValueError("every component weighs 0, so all returns are 0; give at least one a weight")
        return blend
