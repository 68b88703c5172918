"""The live handles that a run's tasks share: engine, trainer process, tokens, positions, clocks.

Those that rollouts need are a class of their own, because rollouts are also played where there is no trainer.

The flow holds them and hands them to tasks as one object, which Prefect neither copies nor stores (`tasks/quoted.py`). This
module owns nothing: whoever opened a handle closes it.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from inference.engine import Engine
from inference.host import EngineHost
from pipeline.frozen_opponent import NOBODY, FrozenOpponent
from records.policy_version import PolicyVersion
from rollouts.fork import Tokens
from rollouts.settings import RolloutSettings
from state_cache.store import StateCache
from storage.control import ControlDesk
from storage.learnable_process import PastSpreadsProcess
from storage.runs import RunPaths
from telemetry.devices import GpuSampler
from telemetry.timing import Spans
from training.messages import ResumePoint
from training.process import TrainerProcess

PRODUCER = "local"
"""Producer name of the rollouts that the training flow itself makes."""
PROBE = "probe"
"""Producer name of the rollouts that compare engine and trainer when a run is resumed."""


@dataclass(kw_only=True)
class Playing:
    """What rollouts of one run are played with, wherever that is."""

    paths: RunPaths
    model: Path
    """Folder of the base model."""
    seed: int
    rollouts: RolloutSettings
    cache: StateCache
    host: EngineHost
    engine: Engine
    """Draws the rollouts."""
    tokens: Tokens
    provenance: dict[str, str]
    """What every shard says of its origin."""
    past_spreads: PastSpreadsProcess
    """What the run's start groups taught so far, for the sampler."""
    max_policy_lag: int
    """The staleness budget, versions."""
    full_disk_wait_s: float = 0.0
    """Seconds for which finished rollouts wait for room on a full disk."""
    frozen: FrozenOpponent = NOBODY
    """The version that opponents of some start groups are played by."""
    spans: Spans = field(default_factory=Spans)


@dataclass(kw_only=True)
class Resources(Playing):
    """What the tasks of the training flow work with."""

    scorer: Engine
    """Draws for evaluation: the same, or workers kept for it, so that the rollouts' prefixes stay warm."""
    trainer: TrainerProcess
    resume_point: ResumePoint
    """Where the run went on when it was opened."""
    control: ControlDesk | None = None
    """Tells those who play elsewhere what is served; None where nobody does."""
    gpus: GpuSampler | None = None
    """Reads this machine's GPUs."""

    async def serve(self, policy: PolicyVersion) -> None:
        """Let the engine play `policy` from now on, and nothing that is too old to train on.

        Requests in flight under such a version are cancelled, and drawn again under the newest: no straggler pins a slot.
        """
        with self.spans.span("publish"):
            for engine in (self.engine,) if self.scorer is self.engine else (self.engine, self.scorer):
                await self.host.run(engine.publish(policy))
                await self.host.run(engine.retire(policy.version - self.max_policy_lag, self.frozen.kept))
            if self.control is not None:
                await asyncio.to_thread(self.control.serve, policy)
