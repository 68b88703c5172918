"""Settings of evaluation: scores on held-out positions, and matches."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from entente.game.scripted import SEARCHES
from entente.players.endpoint import EndpointSettings
from entente.players.search_settings import SearchSettings
from entente.telemetry.setting_marks import Seed, Settings

Measure = Literal["centres", "gained", "sos", "win", "survival", "solo"]

SCORE_SEED = 1000
"""Seed of the positions and samples of every score, so that all scores are comparable."""
POWERS_PER_POSITION = 2
"""Powers measured on each position. Their results are correlated, so more positions add more information than more powers."""


class EvaluationSettings(Settings):
    """How strength is measured."""

    positions: Annotated[int, Field(ge=1)] = 112
    """Held-out positions, from games that training never starts from."""
    horizon_years: Annotated[int, Field(ge=1, le=20)] = 1
    """Game years played from each position."""
    opponents: tuple[str, ...] = ("random", "mover")
    """Scripted players of the other powers; the first gives the score."""
    every: Annotated[int, Field(ge=0)] = 0
    """Versions between two that are measured while training goes on; 0: none."""

    @property
    def question(self) -> "EvaluationSettings":
        """These settings without `every`. Scores with equal questions can be compared."""
        return self.model_copy(update={"every": 0})


class PlaySettings(Settings):
    """How a policy version plays while it is measured."""

    temperature: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Sampling temperature; below 1 the likelier orders are sampled more often than the policy says."""
    strategy: Literal["sample", "search"] = "sample"
    """How a version chooses: it plays what it samples, or the best of the search of `search`."""
    search: SearchSettings = SearchSettings()
    """The search of versions with strategy 'search', and of players such as 'v20+search' and 'dumbbot+search'."""

    def how(self, players: Iterable[str] = ()) -> str:
        """Non-default play in words: temperature, and the search if one of `players` searches; may be empty."""
        parts = [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        if self.strategy == "search" or any(name.endswith(SEARCHES) for name in players):
            from entente.evaluation.intervals import format_count  # loads NumPy, which reading settings does not need

            search, who = self.search, "versions" if self.strategy == "search" else f"'{SEARCHES}'"
            others = f" and {', '.join(search.scripted)}" if search.scripted else ""
            parts.append(
                f"search of {who}: {format_count(search.proposals, 'proposals')}{others}, "
                f"{format_count(search.playouts, 'playouts')} of {format_count(search.years, 'years')} "
                f"by {', '.join(search.player)}"
            )
        return "; ".join(parts)


MATCH_SEED = 1000
"""Default seed of matches."""


class MatchSettings(PlaySettings):
    """Games in which players meet one another in full seats."""

    protocol: str = ""
    """Name of the protocol that these settings follow (entente/evaluation/protocols.toml); empty: none."""
    players: tuple[str, ...] = ("newest", "base", "random", "mover", "territorial", "dumbbot")
    """Who plays: versions of the run ('base', 'newest', 'v20'), of another one ('other:v20'), scripted players, or endpoints
    ('openai:model@http://host:port/v1'); 'v20+search' and 'dumbbot+search' search before they order."""
    opponents: str = ""
    """Scripted player, or version, of the six other seats: each player then plays one seat against six of these, all of them
    from the same starts with the same random numbers. Empty: the players share one table, dealt in turn."""
    start: Literal["standard", "held-out"] = "standard"
    """Where games begin: spring 1901, or the run's held-out positions."""
    years: Annotated[int, Field(ge=1, le=100)] = 6
    """Game years until a game is cut off and counted as it stands, unless a power has won before."""
    games: Annotated[int, Field(ge=0)] = 0
    """Games for each player, or at a shared table in all: rounded up to whole rounds of seven, one for each rotation of the
    seats. 0: 70."""
    measure: Measure = "sos"
    """What the comparison of players is about; the share of squared centres tells players apart where games are cut
    off before a power has won."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 28
    """Games played at the same time."""
    seed: Seed = MATCH_SEED
    """Seed of starts and of all random numbers: games of two seeds are independent."""
    endpoint: EndpointSettings = EndpointSettings()
    """How players that are endpoints are asked."""

    @property
    def description(self) -> str:
        seats = f"one seat against six of {self.opponents}" if self.opponents else "all players at one table"
        start = "spring 1901" if self.start == "standard" else "held-out positions"
        how = self.how((*self.players, self.opponents))
        return f"{seats}, from {start}, up to {self.years} year{'s' * (self.years > 1)}{how and '; ' + how}"

    def how(self, players: Iterable[str] = ()) -> str:
        """See `PlaySettings.how`; the protocol first, then a seed other than MATCH_SEED."""
        seed = "" if self.seed == MATCH_SEED else f"seed {self.seed}"
        return "; ".join(part for part in (self.protocol and f"protocol {self.protocol}", seed, super().how(players)) if part)
