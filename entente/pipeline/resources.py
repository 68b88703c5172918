"""The open objects that the tasks of a run share: engine, trainer process, tokens, positions, clocks.

`RolloutResources` is a class of its own because rollouts are also played where there is no trainer.

The flow passes them to tasks as one object, which Prefect neither copies nor stores (`tasks/rollouts.py`). The code that opened
an object closes it.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.outside.endpoint import OutsideSettings
from entente.outside.players import OutsidePlayers
from entente.pipeline.league import League
from entente.pipeline.past_versions import PastVersions
from entente.records.policy_version import PolicyVersion
from entente.rollouts.fork import Tokens
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.devices import GpuSampler
from entente.telemetry.timing import Spans
from entente.training.messages import ResumePoint
from entente.training.process import TrainerProcess
from state_cache.store import StateCache
from storage.control import ControlDesk
from storage.learnable import PastReturns
from storage.runs import RunPaths
from storage.shards import LOCAL_PRODUCER

PRODUCER = LOCAL_PRODUCER
"""Producer name of the training flow's own rollouts."""
PROBE = "probe"
"""Producer name of the rollouts on which engine and trainer are compared when a run is resumed."""


@dataclass(kw_only=True)
class RolloutResources:
    """What a process needs to play rollouts of one run."""

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
    """Written into the metadata of every shard."""
    past_returns: PastReturns
    """Returns of the run's past start groups, for the sampler."""
    max_policy_lag: int
    """The staleness budget, versions."""
    outside: OutsideSettings = field(default_factory=OutsideSettings)
    """How endpoints among the opponents are asked."""
    spans: Spans = field(default_factory=Spans)
    league: League = field(init=False)
    """Chooses the past versions that play opponents."""
    past: PastVersions = field(init=False)
    """Serves them."""
    endpoints: OutsidePlayers = field(init=False)
    """The endpoints among the opponents."""

    def __post_init__(self) -> None:
        self.league = League(self.paths, self.rollouts.start_groups)
        self.past = PastVersions(self.paths, self.engine, self.tokens, always=self.rollouts.lasting_versions)
        self.endpoints = OutsidePlayers(self.rollouts.endpoints, self.paths.answers, self.outside)


@dataclass(kw_only=True)
class Resources(RolloutResources):
    """What the tasks of the training flow need."""

    trainer: TrainerProcess
    resume_point: ResumePoint
    """State of the run when it was opened."""
    control: ControlDesk | None = None
    """Publishes the served version to processes that play for the run; None if there are none."""
    gpus: GpuSampler | None = None
    """Reads this machine's GPUs; None without GPUs."""

    async def serve(self, policy: PolicyVersion) -> None:
        """Publish `policy` to the engine and retire versions beyond the staleness budget.

        Requests in flight under a retired version are cancelled and drawn again under the newest, so a straggler keeps no slot.
        """
        with self.spans.span("publish"):
            await self.host.run(self.past.publish(policy))
            await self.host.run(self.past.retire(policy.version - self.max_policy_lag))
            if self.control is not None:
                await asyncio.to_thread(self.control.serve, policy)
