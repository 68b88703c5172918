"""Settings of rollouts: how many forks of how many positions, how far, and against whom."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from game.settings import BoardPath
from telemetry.setting_marks import STAYS


class RolloutSettings(BaseModel):
    """What one training step plays."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    start_groups: Annotated[int, STAYS, Field(ge=1, le=4096)] = 16
    """Start groups rolled out for each training step."""
    sampling: Literal["uniform", "stratified", "learnable"] = "uniform"
    """How a step's positions are drawn: all alike; every year, kind of phase and balance of power alike; or preferring those
    whose past groups had spread in their returns.
    """
    forks_per_group: Annotated[int, Field(ge=2, le=256)] = 8
    """Forks of each snapshot; more lowers the variance of advantages for little, since they share their prefix."""
    branch_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Movement phases after the first, as 1 for the next one, at each of which one fork of every position is forked again: that
    board becomes a start group of its own, which ends when the first would have. So later phases have groups of truly one board,
    too. They count among start_groups, which must divide by one more than these."""
    horizon_years: Annotated[int, Field(ge=1, le=20)] = 3
    """Game years from the fork's phase to its end."""
    settled_years: Annotated[int, Field(ge=0, le=20)] = 2
    """Game years without any centre changing hands after which a fork ends early; 0: it plays to its horizon."""
    policy_powers: Literal["one", "all"] = "one"
    """'one': the policy plays one power of each group, scripted players the others; 'all': it plays all seven."""
    opponents: str = "random"
    """Scripted player of the powers that the policy does not play, or several with commas, as 'random,mover,territorial': each
    start group then draws one of them. Random numbers are shared within a group."""
    frozen_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of start groups whose opponents are one frozen version of the run instead; its decisions are not trained on. Where
    versions are served as merged weights it takes an engine of its own."""
    frozen_version: Annotated[int, Field(ge=0)] = 0
    """That version: 0 is the base; another one must be published already, so it is for a run that goes on in another lineage."""
    temperature: Annotated[float, Field(gt=0, le=4)] = 1.0
    """Softmax temperature of the draws; 1, so that the policy trained is the policy that plays."""
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a task's forks that may fail before the task itself does."""
    board_path: BoardPath = BoardPath.FAST
    """'fast', or 'plain': the game engine's public calls only, several times slower, the same games."""

    @property
    def scripted_opponents(self) -> tuple[str, ...]:
        """The scripted players that a start group may draw."""
        return tuple(name.strip() for name in self.opponents.split(",") if name.strip())

    @property
    def family(self) -> int:
        """Start groups that come of one position: its own, and one for each branch."""
        return 1 + len(self.branch_at)

    @model_validator(mode="after")
    def _somebody_plays(self) -> "RolloutSettings":
        if not self.scripted_opponents:
            raise ValueError(
                f"rollouts.opponents {self.opponents!r} names nobody: name a scripted player, or several with commas"
            )
        return self

    @model_validator(mode="after")
    def _whole_families(self) -> "RolloutSettings":
        if self.start_groups % self.family:
            raise ValueError(
                f"rollouts.start_groups {self.start_groups} does not divide by {self.family}, the start groups of a position "
                f"with rollouts.branch_at {list(self.branch_at)}: take a multiple"
            )
        return self
