"""Settings of storage: how returns are computed, and how old the rows of a step may be."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from entente.telemetry.read_file import read_text
from entente.telemetry.setting_marks import MAY_CHANGE_RECORDED, Settings

NAMED_WEIGHTS: dict[str, dict[str, float]] = {
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
"""Blends by name. "dense" has the weights of the system that Entente replaces, for discount 0: 0.8 of two points per centre and
half a point per dislodgement, and 0.2 of the final centres, leader gap and balance. It leaves out that system's terms for
units, influence and threats, which follow from centres, and its bonus for rank.
"""


_LONGEST_QUERY = 16_384
"""Largest size of an SQL file in bytes. Settings and each ledger hold its text."""


def query_text(query: Any) -> Any:
    """The text of the .sql file `query`, or `query` itself; raises InputError if the file is unreadable or too long."""
    if isinstance(query, str) and query.endswith(".sql") and "\n" not in query:
        return read_text(Path(query), at_most=_LONGEST_QUERY, what="query").strip() + "\n"  # so it never looks like a file name
    return query


class StorageSettings(Settings):
    """How returns are computed, and how old the rows of a step may be."""

    reward_weights: dict[str, float] = Field(default_factory=lambda: {"centres_gained": 1.0})
    """Weight of each reward component in a return; `final_` before its name means its sum to the fork's end. Or the name of
    named weights: centres, sum_of_squares, draw_size or dense. A later layer replaces all weights of an earlier one."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor per later decision of the same power in the fork."""
    max_policy_lag: Annotated[int, MAY_CHANGE_RECORDED, Field(ge=0)] = 2
    """Maximum policy versions by which the oldest row of an advantage group may lag behind the trainer."""
    max_uses: Annotated[int, Field(ge=1)] = 1
    """Steps that may train on one advantage group. A step still plays rollouts.start_groups new ones and trains on as many:
    above 1, older start groups take the places of some new ones, which may never be trained on."""
    selection: Annotated[str, BeforeValidator(query_text)] = ""
    """Your own SQL that chooses the start groups of a step: a .sql file, which is run without limits; empty: they are sampled."""

    @field_validator("reward_weights", mode="before")
    @classmethod
    def _by_name(cls, weights: Any) -> Any:
        if isinstance(weights, str):
            if weights not in NAMED_WEIGHTS:
                raise ValueError(f"there are no weights named {weights!r}; known ones are {', '.join(NAMED_WEIGHTS)}")
            return dict(NAMED_WEIGHTS[weights])
        return weights

    @field_validator("reward_weights")
    @classmethod
    def _some_weight(cls, weights: dict[str, float]) -> dict[str, float]:
        if not any(weights.values()):
            raise ValueError("every component has weight 0, so all returns are 0; give at least one a nonzero weight")
        return weights
