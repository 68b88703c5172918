"""Settings of the state cache: number, years and phases of positions, and the players of the source games."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from entente.game.scripted import player
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import Seed, Settings, all_layers_merged

NEWEST = "newest"
"""A value of `cache.from_run`: the newest refresh, whose own values replace it before a run stores its settings."""


class CacheSettings(Settings):
    """What the state cache is built from. Equal settings give the same cache, byte for byte; with `from_run`, as long as that run
    keeps its shards; with bots of your own, as long as their package does not change."""

    train_snapshots: Annotated[int, Field(ge=1)] = 1000
    """Positions to train from."""
    held_out_snapshots: Annotated[int, Field(ge=1)] = 112
    """Positions kept for evaluation, from other games."""
    first_year: Annotated[int, Field(ge=1901, le=1999)] = 1902
    """Earliest game year of a position."""
    last_year: Annotated[int, Field(ge=1901, le=1999)] = 1907
    """Latest game year of a position."""
    players: Annotated[tuple[str, ...], Field(min_length=1)] = ("random", "mover")
    """Scripted players, sampled anew for each power of each source game."""
    seed: Seed = 0
    """Seed of the source games."""
    phases: Annotated[tuple[Literal["SM", "SR", "FM", "FR", "WA"], ...], Field(min_length=1)] = ("SM", "SR", "FM", "FR", "WA")
    """Phases to save: season and kind (M movement, R retreats, A adjustments)."""
    stratify_by: Literal["years", "strata"] = "strata"
    """Which phases of a source game are frozen: 'years', one from each quarter of the game; 'strata', the four of the
    rarest strata (year, kind of phase, balance of power)."""
    from_run: str = ""
    """Run whose rollouts give a share of the training positions; empty: none; 'newest': start
    from the newest refresh whose other cache settings equal these, or from the plain cache if there is none."""
    from_groups: Annotated[int, Field(ge=0)] = 0
    """Start groups of that run that count: those with smaller numbers."""
    on_policy_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the training positions that come from from_run."""

    @property
    def scripted(self) -> Self:
        """These settings without positions of a run: those of the cache that a refresh starts from."""
        defaults = type(self)()
        reset = ("from_run", "from_groups", "on_policy_share")
        return self.model_copy(update={name: getattr(defaults, name) for name in reset})

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if all_layers_merged() and self.first_year > self.last_year:
            raise ValueError(f"first_year {self.first_year} lies after last_year {self.last_year}: swap them")
        if all_layers_merged() and bool(self.from_groups) != (self.from_run not in ("", NEWEST)):
            raise ValueError(
                f"from_run {self.from_run!r} and from_groups {self.from_groups} go together: `entente cache refresh` names both"
            )
        if all_layers_merged() and self.from_run == NEWEST and self.on_policy_share != type(self)().on_policy_share:
            raise ValueError(
                f"on_policy_share {self.on_policy_share:g} cannot change the newest refresh, which has its own: leave it out, or "
                "publish one with `entente cache refresh --share`"
            )
        for name in self.players:
            try:
                player(name)
            except InputError as error:
                raise ValueError(str(error)) from error
        return self
