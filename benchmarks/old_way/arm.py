"""One arm of a comparison: rollouts, files, a training step and a new version, in one process, on one thread.

Nothing overlaps in one process, so CPU seconds by stage are the cost of each stage. `run` measures wall time with overlap.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.old_way.engine import OldEngine, TimedEngine
from benchmarks.old_way.games import Start
from benchmarks.old_way.learn import Learned, Learner
from benchmarks.old_way.play import Counts, Row, Table
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trajectories import write
from benchmarks.old_way.ways import Way
from decoding.codec import Codec
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.snapshot import Snapshot
from inference.settings import InferenceSettings
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs of all arms: those of the run they are compared with."""

    compact_model: Path
    json_model: Path
    positions: Sequence[Snapshot]
    rollouts: RolloutSettings
    training: TrainingSettings
    inference: InferenceSettings
    folder: Path
    """Folder for trajectories and adapters."""
    prompts: PromptSettings = DEFAULT_PROMPTS
    """Form of compact prompts and their completions."""
    seed: int = 0

    def model(self, way: Way) -> Path:
        """The model that learned the prompts of `way`."""
        return self.compact_model if way.compact_prompts else self.json_model


def engine_of(way: Way, setting: Setting, clock: StageClock, name: str) -> TimedEngine:
    """The engine of `way`, not started."""
    inference = setting.inference.model_copy(
        update={
            # On a CPU the old system's LoRA slots would take ten times as long as the base model.
            "adapters": "merge_reload",
            "prefix_caching": way.prefix_cache,
            "max_model_length": max(1024, setting.inference.max_model_length),
            # A trie does not know forced tokens.
            "jump_forced": "on" if way.forced_jump and way.mask_core else "off",
        }
    )
    kind = TimedEngine if way.mask_core else OldEngine
    return kind(setting.model(way), inference, name=name, clock=clock, raw_logprobs=not way.packing)


class Arm:
    """Runs a way: `start`, then steps, then `close`."""

    def __init__(self, name: str, way: Way, setting: Setting, *, trains: bool = True) -> None:
        self.name, self.way, self.setting, self.clock = name, way, setting, StageClock()
        self._folder = setting.folder / name
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self.engine = engine_of(way, setting, self.clock, name)
        codec = Codec(setting.model(way))
        self.table = Table(
            way=way,
            engine=self.engine,
            codec=codec,
            clock=self.clock,
            temperature=setting.rollouts.temperature,
            opponents=setting.rollouts.opponents,
            record_legal=way.packing,
            prompts=setting.prompts,
        )
        self._codec, self._trains = codec, trains
        self._learner: Learner | None = None

    async def start(self) -> None:
        """Load the model and start the engine."""
        await self.engine.start()
        if self._trains:
            training = self.setting.training.model_copy(update={"device": "cpu"})
            self._learner = Learner(self.setting.model(self.way), self.way, training, self._folder, self.clock)

    async def close(self) -> None:
        """Stop the engine."""
        await self.engine.close()

    async def roll_out(self, step: int, groups: int | None = None) -> list[Row]:
        """All rollouts of a step, or its first `groups`, at the same time; returns when the slowest is done."""
        starts = starts_of(self.setting, step)[:groups]
        rollouts = self.setting.rollouts
        played = await asyncio.gather(
            *(
                self.table.roll_out(
                    start,
                    seed=self.setting.seed,
                    forks=rollouts.forks_per_group,
                    years=rollouts.horizon_years,
                    settled_years=rollouts.settled_years,
                )
                for start in starts
            )
        )
        return [row for rows in played for row in rows]

    def publish_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Write the rows of a step."""
        with self.clock("write"):
            write(self.way, self._folder, step, rows, self._codec)

    async def learn(self, step: int) -> Learned:
        """Train on the files of `step` and serve the new version."""
        assert self._learner is not None
        learned = self._learner.learn(step)
        await self.serve(step, learned)
        return learned

    async def serve(self, version: int, learned: Learned) -> None:
        """Publish a version to the engine, which first finishes the requests in flight."""
        began, others = time.process_time(), sum(self.clock.cpu_s.values())
        await self.engine.publish(replace(learned.policy, version=version))
        # Other work of the event loop counts for its own stages.
        spent = time.process_time() - began - (sum(self.clock.cpu_s.values()) - others)
        self.clock.cpu_s["publish"] += max(0.0, spent)

    def take_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self.table.counts = self.table.counts, Counts()
        return counts


def starts_of(setting: Setting, step: int) -> list[Start]:
    """The start groups of a step, drawn as in a run."""
    rollouts = setting.rollouts
    drawn = sample_start_positions(setting.positions, rollouts.start_groups, setting.seed, step, sampling="uniform")
    first = (step - 1) * rollouts.start_groups
    one_power = rollouts.policy_powers == "one"
    return [
        Start(number=first + place, snapshot=snapshot, power=power if one_power else None)
        for place, (snapshot, power) in enumerate(drawn)
    ]
