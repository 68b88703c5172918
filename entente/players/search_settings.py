"""Settings of the search at play."""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from entente.telemetry.setting_marks import Settings

MOST_PROPOSALS = 256
"""Most order sets that the searching player samples for one decision."""


def _split(names: object) -> object:
    """Split 'dumbbot,territorial' into names, also within a list."""
    if isinstance(names, str):
        names = (names,)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Names of players; a text with commas holds several."""


class SearchSettings(Settings):
    """The search of one decision."""

    proposals: Annotated[int, Field(ge=0, le=MOST_PROPOSALS)] = 1
    """Order sets that the searching player samples: a policy version, or a scripted player as in 'dumbbot+search'."""
    scripted: Names = ("dumbbot", "dumbbot", "dumbbot")
    """Scripted players that also propose, one order set per name, such as 'dumbbot,dumbbot,territorial'."""
    playouts: Annotated[int, Field(ge=1, le=65536)] = 200
    """Playouts per decision. All proposals race; then order sets that differ from the best so far in one or two orders, until
    the playouts are used up."""
    years: Annotated[int, Field(ge=1, le=20)] = 1
    """Horizon of a playout: game years, counted from the position's phase."""
    player: Names = ("dumbbot",)
    """Who plays all seats in a playout: what the search assumes about every power. With several scripted players,
    each seat samples one from a seed."""

    @model_validator(mode="after")
    def _check(self) -> "SearchSettings":
        if not self.proposals and not self.scripted:
            raise ValueError("a search has no order sets to choose from: set search.proposals or search.scripted")
        if not self.player:
            raise ValueError("search.player is empty: name the players of the playouts, as 'dumbbot'")
        return self
