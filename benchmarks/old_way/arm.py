"""One arm of a comparison: rollouts, files, a training step and a new version, in one process, on one thread, on a clock.

In one process nothing overlaps, so CPU seconds by stage are what each stage costs; what the clock on the wall makes of it with
the old trainer beside the old rollouts is `run`'s to measure.
"""

import asyncio
import os
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
    """What arms share: model, positions and sizes are those of the run they are held against."""

    compact_model: Path
    json_model: Path
    positions: Sequence[Snapshot]
    rollouts: RolloutSettings
    training: TrainingSettings
    inference: InferenceSettings
    folder: Path
    """Where trajectories and adapters go."""
    prompts: PromptSettings = DEFAULT_PROMPTS
    """How compact prompts are written, and answered."""
    seed: int = 0

    def model(self, way: Way) -> Path:
        """The one that reads the way's prompts."""
        return self.compact_model if way.compact_prompts else self.json_model


def engine_of(way: Way, setting: Setting, clock: StageClock, name: str) -> TimedEngine:
    """The engine that the way asks, not started."""
    inference = setting.inference.model_copy(
        update={
            # The old system's LoRA slots cost ten times the base model's time on a CPU, which is no fault of its design.
            "adapters": "merge_reload",
            "prefix_caching": way.prefix_cache,
            "max_model_length": max(1024, setting.inference.max_model_length),
            # A trie tells what may come next, and not what must.
            "jump_forced": "on" if way.forced_jump and way.mask_core else "off",
        }
    )
    kind = TimedEngine if way.mask_core else OldEngine
    return kind(setting.model(way), inference, name=name, clock=clock, raw_logprobs=not way.packing)


class Arm:
    """A way at work; `start` it, take steps, `close` it."""

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
        """Load model and engine."""
        await self.engine.start()
        if self._trains:
            training = self.setting.training.model_copy(update={"device": "cpu"})
            self._learner = Learner(self.setting.model(self.way), self.way, training, self._folder, self.clock)

    async def close(self) -> None:
        """Free the engine."""
        await self.engine.close()

    async def roll_out(self, step: int, groups: int | None = None) -> list[Row]:
        """All rollouts of a step, or its first `groups`, beside one another; the step has them when the slowest is done."""
        starts = starts_of(self.setting, step)[:groups]
        rollouts = self.setting.rollouts
        played = await asyncio.gather(
            *(
                self.table.roll_out(start, seed=self.setting.seed, forks=rollouts.forks_per_group, years=rollouts.horizon_years)
                for start in starts
            )
        )
        return [row for rows in played for row in rows]

    def publish_rows(self, step: int, rows: Sequence[Row]) -> int:
        """Write them; bytes on the disk."""
        with self.clock("write"):
            write(self.way, self._folder, step, rows, self._codec)
        folder = self._folder / f"step-{step:05d}"
        return sum(os.path.getsize(Path(root) / name) for root, _, names in os.walk(folder) for name in names)

    async def learn(self, step: int) -> Learned:
        """Train on what lies there for `step`, and serve what comes of it."""
        assert self._learner is not None
        learned = self._learner.learn(step)
        await self.serve(step, learned)
        return learned

    async def serve(self, version: int, learned: Learned) -> None:
        """Have the engine play by this version; what was in flight is done before."""
        began, others = time.process_time(), sum(self.clock.cpu_s.values())
        await self.engine.publish(replace(learned.policy, version=version))
        # What the event loop did meanwhile has its own stages.
        spent = time.process_time() - began - (sum(self.clock.cpu_s.values()) - others)
        self.clock.cpu_s["publish"] += max(0.0, spent)

    def fresh_counts(self) -> Counts:
        """The counts so far, which begin anew."""
        counts, self.table.counts = self.table.counts, Counts()
        return counts


def starts_of(setting: Setting, step: int) -> list[Start]:
    """Start groups of a step, as a run draws them."""
    rollouts = setting.rollouts
    drawn = sample_start_positions(setting.positions, rollouts.start_groups, setting.seed, step, sampling="uniform")
    first = (step - 1) * rollouts.start_groups
    return [Start(number=first + place, snapshot=snapshot, power=power) for place, (snapshot, power) in enumerate(drawn)]
