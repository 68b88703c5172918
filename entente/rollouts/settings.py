"""Settings of rollouts: number of start groups and forks, horizon, opponents."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from entente.game.scripted import SEARCHES
from entente.players.opponents import LEAGUE, OpponentTable, is_endpoint, read_table, version_of
from entente.records.policy_version import BASE_VERSION
from entente.telemetry.setting_marks import Settings
from state_cache.sampling import Sampling

_WEIGHTS_MAX = 1e9
"""Largest sum of weights, and 1 over the smallest: shares and products of weights, such as a league's, must not underflow."""


class RolloutSettings(Settings):
    """The rollouts of one training step."""

    start_groups: Annotated[int, Field(ge=1, le=4096)] = 16
    """Start groups per training step."""
    sampling: Sampling = "uniform"
    """How positions are sampled: 'uniform'; 'stratified' by year, phase and balance of power; 'large', uniform, but with more of
    the powers that have many units."""
    forks_per_group: Annotated[int, Field(ge=2, le=256)] = 8
    """Forks of each snapshot; they share a prompt prefix, so more forks lower the variance of advantages cheaply."""
    horizon_years: Annotated[int, Field(ge=1, le=20)] = 3
    """Game years of a fork, as the number of winter centre counts: a fork of one year from autumn has one movement phase."""
    horizon_schedule: str = ""
    """Later horizons as step:years, such as '40:2,120:4'; horizon_years before."""
    policy_powers: Literal["one", "all"] = "one"
    """'one': the policy plays one power of each group; 'all': it plays all seven, and opponents and
    opponents_by have no effect."""
    opponents: str = "random"
    """Players of the other powers, sampled by weight: names with weights, such as 'dumbbot*3,v0,league*2'. A name is a scripted
    player or 'v0', the policy at the run's start, either with '+search', an endpoint ('openai:MODEL@URL'), or 'league': past
    versions."""
    opponents_by: Literal["group", "seat"] = "group"
    """Sample one opponent for the six other seats of a start group, or one for each seat."""
    temperature: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Sampling temperature; at 1 the trained policy is the policy that plays."""

    @property
    def horizons(self) -> tuple[tuple[int, int], ...]:
        """(first step, game years) of each entry of `horizon_schedule`; raises a ValueError if it cannot be read."""
        entries = [entry.partition(":") for entry in self.horizon_schedule.split(",") if entry.strip()]
        return tuple((int(step), int(years)) for step, _, years in entries)

    def at(self, step: int) -> "RolloutSettings":
        years = [years for first, years in self.horizons if first <= step]
        return self.model_copy(update={"horizon_years": years[-1]}) if years else self

    @property
    def opponent_table(self) -> OpponentTable:
        return read_table(self.opponents)

    @property
    def scripted_opponents(self) -> tuple[str, ...]:
        """Names of the scripted players in the table, also of those that search."""
        names = [name for name, _ in self.opponent_table if name != LEAGUE and version_of(name) is None and not is_endpoint(name)]
        return tuple(dict.fromkeys(name.removesuffix(SEARCHES) for name in names))

    @property
    def searching_opponents(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.opponent_table if name.endswith(SEARCHES))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints in the table; none where the policy plays all powers."""
        if self.policy_powers == "all":
            return ()
        return tuple(dict.fromkeys(name for name, _ in self.opponent_table if is_endpoint(name)))

    @property
    def opponent_versions(self) -> frozenset[int]:
        """Policy versions in the table, including members of the league once they replace 'league'."""
        return frozenset(version for name, _ in self.opponent_table if (version := version_of(name)) is not None)

    @property
    def lasting_versions(self) -> frozenset[int]:
        """Policy versions that may play opponents at any time: 0, if it is named or in the league."""
        return self.opponent_versions | ({BASE_VERSION} if self.has_league else set())

    @property
    def has_league(self) -> bool:
        return self.policy_powers == "one" and any(name == LEAGUE for name, _ in self.opponent_table)

    @model_validator(mode="after")
    def _check_opponents(self) -> "RolloutSettings":
        total = sum(weight for _, weight in read_table(self.opponents))
        if not 1 / _WEIGHTS_MAX <= total <= _WEIGHTS_MAX:
            raise ValueError(
                f"rollouts.opponents {self.opponents!r}: the weights sum to {total:g}: give weights whose sum lies between "
                f"{1 / _WEIGHTS_MAX:g} and {_WEIGHTS_MAX:g}"
            )
        if later := sorted(self.opponent_versions - {BASE_VERSION}):
            raise ValueError(
                f"rollouts.opponents {self.opponents!r} names v{later[0]}, which no run has at its start: name 'league' for "
                f"past versions, or start from step {later[0]} of another run (--init-from RUN:{later[0]}), which is 'v0' then"
            )
        return self

    @model_validator(mode="after")
    def _check_horizons(self) -> "RolloutSettings":
        try:
            horizons = self.horizons
        except ValueError:
            horizons = ((0, 0),)
        steps = [step for step, _ in horizons]
        if steps != sorted(set(steps)) or any(step < 1 or not 1 <= years <= 20 for step, years in horizons):
            raise ValueError(
                f"rollouts.horizon_schedule {self.horizon_schedule!r} is no list of step:years with rising steps from 1 on and 1 "
                "to 20 years: write it like '40:2,120:4'"
            )
        return self
