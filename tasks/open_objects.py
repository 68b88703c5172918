"""The open objects that a training run's tasks share: rollout resources, trainer process, control file.

Passed to tasks as one object, which Prefect neither copies, stores nor visits (`quoted` in `tasks/train_policy.py`). The
code that opened an object closes it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from entente.records.policy_version import PolicyVersion, TrainedStep
from entente.rollouts.resources import RolloutResources
from entente.telemetry.devices import GpuSampler
from entente.training.process import TrainerProcess
from storage.control import ControlDesk


@dataclass(kw_only=True)
class OpenRun(RolloutResources):
    max_policy_lag: int
    """The staleness budget, versions."""
    trainer: TrainerProcess
    engine_threads: tuple[int, int]
    """CPU threads of the engine beside the trainer, and alone."""
    resume_point: TrainedStep
    """State of the run at its opening."""
    control: ControlDesk | None = None
    """Publishes the served version to rollout processes on other machines; None without them."""
    gpus: GpuSampler | None = None
    """Reads this machine's GPUs; None without GPUs."""

    @asynccontextmanager
    async def engine_alone(self) -> AsyncIterator[None]:
        """While the trainer is idle, let the engine use all cores. Threads change the order of summation, so where two runs of
        one seed must be equal this may not depend on measured time."""
        beside, alone = self.engine_threads
        await self.host.run(self.engine.use_threads(alone))
        try:
            yield
        finally:
            await self.host.run(self.engine.use_threads(beside))

    async def saved(self) -> PolicyVersion:
        """The version of the next trained step, once it is published. Raises the error of the trainer's writer."""
        with self.spans.span("publish"):
            return await asyncio.to_thread(self.trainer.saved)

    async def serve(self, policy: PolicyVersion) -> None:
        """Publish `policy` to the engine and retire versions beyond the staleness budget. Requests in flight under a retired
        version are cancelled and resampled under the newest, so a straggler keeps no slot."""
        with self.spans.span("publish"):
            await self.host.run(self.past.publish(policy))
            await self.host.run(self.past.retire(policy.version - self.max_policy_lag))
            if self.control is not None:
                await asyncio.to_thread(self.control.serve, policy)
