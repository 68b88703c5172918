"""Settings of search at play: who proposes, and how proposals are played out."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST_PROPOSALS = 256
"""Most order sets that the searching player draws for one decision."""
POLICY_PLAYS = "policy"
"""Name in `SearchSettings.player` of the version that searches."""


def _split(names: object) -> object:
    """'dumbbot,territorial' as two names, also within a list."""
    if isinstance(names, str):
        names = (names,)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Names of players; a text with commas holds several."""


class SearchSettings(BaseModel):
    """The search of one decision."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    proposals: Annotated[int, Field(ge=0, le=MOST_PROPOSALS)] = 4
    """Order sets that the searching player draws: a policy version, or a scripted player such as the one of 'dumbbot+search'."""
    scripted: Names = ()
    """Scripted players that propose too, each name once for each order set, as 'dumbbot,dumbbot,territorial'."""
    playouts: Annotated[int, Field(ge=1, le=65536)] = 16
    """Playouts of one decision in all; sequential halving divides them among its proposals."""
    years: Annotated[int, Field(ge=0, le=20)] = 1
    """Horizon of a playout: game years, counted from the position's phase; 0, with a value head: the phase itself."""
    player: Names = ("dumbbot",)
    """Who plays all seats in a playout: what the search assumes about everybody. Of several, each seat draws one by a seeded lot.
    Scripted players, or 'policy', the version that searches, which is much slower."""
    value: Literal["centres", "squares", "head_centres", "head_squares"] = "centres"
    """What counts at the end of a playout: the power's supply centres, or its share of squared centres; or what of these the
    value head of the searching version foretells there. Then a playout goes on to the next phase that asks the power."""

    @property
    def asks_head(self) -> bool:
        """True if a value head values the ends of playouts."""
        return self.value.startswith("head_")

    @property
    def counted(self) -> str:
        """'centres' or 'squares'."""
        return self.value.removeprefix("head_")

    @model_validator(mode="after")
    def _check(self) -> "SearchSettings":
        if not self.proposals and not self.scripted:
            raise ValueError("a search needs order sets to choose from: give search.proposals or search.scripted")
        if not self.player:
            raise ValueError("somebody must play the playouts: give search.player, as 'dumbbot'")
        if not self.asks_head and not self.years:
            raise ValueError("search.years 0 counts nothing that was won: give 1 or more, or search.value 'head_centres'")
        if self.asks_head and POLICY_PLAYS in self.player:
            raise ValueError(f"search.value '{self.value}' needs scripted players: leave '{POLICY_PLAYS}' out of search.player")
        if self.playouts < self.proposals + len(self.scripted):
            raise ValueError(
                f"search.playouts {self.playouts} is less than one for each of the {self.proposals} + {len(self.scripted)} order "
                "sets of search.proposals and search.scripted: give more playouts, or fewer order sets"
            )
        return self
