"""Settings of the search at play."""

from typing import Annotated, Literal

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
    """Scripted players that propose too, each name once for each order set, as 'dumbbot,dumbbot,territorial'."""
    playouts: Annotated[int, Field(ge=1, le=65536)] = 40
    """Playouts of a decision. All proposals race; then sets that differ from the best so far in an order or two, until so many
    playouts are used."""
    years: Annotated[int, Field(ge=1, le=20)] = 1
    """Horizon of a playout: game years, counted from the position's phase."""
    player: Names = ("dumbbot",)
    """Who plays all seats in a playout: what the search assumes about everybody. Of several scripted players
    each seat samples one, by a seed."""
    value: Literal["centres", "squares"] = "centres"
    """What counts at the end of a playout: the power's supply centres, or its share of squared centres."""

    @model_validator(mode="after")
    def _check(self) -> "SearchSettings":
        if not self.proposals and not self.scripted:
            raise ValueError("a search has no order sets to choose from: set search.proposals or search.scripted")
        if not self.player:
            raise ValueError("search.player is empty: name the players of the playouts, as 'dumbbot'")
        return self
