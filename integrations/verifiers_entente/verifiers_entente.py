"""Positions of a state cache as tasks for verifiers: `vf-eval verifiers-entente --env.taskset.cache FOLDER …`.

A task asks one power for its orders. The answer is played to the horizon. The reward is the number of centres gained; the other
reward components are metrics. Repeated rollouts of a task share their luck.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from pydantic import Field, field_validator

from game.board import Board
from game.snapshot import Snapshot
from integrations.questions import Question, check_opponents, questions_of, read_orders, score_orders
from rollouts.settings import RolloutSettings
from state_cache.store import open_cache
from telemetry.errors import InputError

__all__ = ["EntenteTaskset"]


class PlayConfig(vf.TaskConfig):
    """How answers are played."""

    years: Annotated[int, Field(ge=1, le=20)] = 1
    """Game years to the end."""
    opponents: str = "random"
    """Scripted players of the other powers, by lot, such as 'dumbbot*3,random'."""

    @field_validator("opponents")
    @classmethod
    def _check_opponents(cls, opponents: str) -> str:
        try:
            check_opponents(RolloutSettings(opponents=opponents))
        except InputError as error:
            raise ValueError(str(error)) from error
        return opponents

    def rollouts(self) -> RolloutSettings:
        """The settings of a fork."""
        return RolloutSettings(horizon_years=self.years, opponents=self.opponents)


class PositionsConfig(vf.TasksetConfig):
    """Which positions are asked."""

    task: PlayConfig = PlayConfig()
    cache: Path | None = None
    """Folder of a state cache, which must be given; `entente cache show` lists them."""
    part: Literal["train", "held_out"] = "train"
    """Which of its positions."""
    seed: int = 0
    """Seed of the order of positions and of the power that each asks."""


class PositionData(vf.TaskData):
    """A position and the power that is asked."""

    snapshot: dict[str, Any]
    power: str


class PositionTask(vf.Task[PositionData, vf.State, PlayConfig]):
    """One question."""

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Play the answer, once for all that is read of it."""
        snapshot = Snapshot(**{**self.data.snapshot, "centres": tuple(self.data.snapshot["centres"])})
        board = Board.restore(snapshot)
        legal = board.legal_orders()[self.data.power]
        orders, ordered = read_orders(trace.last_reply, legal)
        question = Question(text=self.data.prompt_text, snapshot=snapshot, power=self.data.power, legal=legal)
        shared = f"verifiers/{snapshot.snapshot_id}"
        found = await score_orders(question, orders, self.config.rollouts(), shared=shared, name="answer", board=board)
        trace.info["played"] = {**found, "ordered_share": ordered / len(orders)}

    @vf.reward
    async def centres_gained(self, trace: vf.Trace) -> float:
        """Centres at the end minus centres now."""
        return trace.info["played"]["centres_gained"]

    @vf.metric
    async def components(self, trace: vf.Trace) -> Mapping[str, float]:
        """The other components, and the share of units that got a legal order."""
        return {name: value for name, value in trace.info["played"].items() if name != "centres_gained"}


class EntenteTaskset(vf.Taskset[PositionTask, PositionsConfig]):
    """The positions of a state cache at which a power moves and has a choice."""

    def load(self) -> Iterator[PositionTask]:
        """One task a position."""
        if self.config.cache is None:
            raise InputError("give the folder of a state cache: --env.taskset.cache FOLDER")
        cache = open_cache(self.config.cache)
        positions = cache.train if self.config.part == "train" else cache.held_out
        for question in questions_of(positions, seed=self.config.seed):
            snapshot = question.snapshot
            data = PositionData(
                name=f"{snapshot.snapshot_id} {question.power} {snapshot.phase}",
                prompt=question.text,
                snapshot=asdict(snapshot),
                power=question.power,
            )
            yield PositionTask(data, self.config.task)
