"""The settings tree of a run: a section per package. `layers.py` builds it, `check_settings.py` checks it."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from entente.evaluation.settings import EvaluationSettings
from entente.game.prompts import PromptSettings
from entente.inference.settings import InferenceSettings
from entente.players.endpoint import EndpointSettings
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.machine import plan_threads, usable_cores
from entente.telemetry.setting_marks import (
    MAY_CHANGE,
    Seed,
    Settings,
)
from entente.telemetry.sinks import TelemetrySettings
from entente.training.settings import TinyModelSettings, TrainingSettings
from state_cache.settings import CacheSettings
from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings

ROLLOUT_TIMEOUT_S = 900.0
"""Seconds after which a rollout task is cancelled and retried; whole games with search take minutes."""
DEEPEST_BUFFER = 64
"""Largest `pipeline.buffer_depth`."""


class PipelineSettings(Settings):
    """How rollouts and training overlap, and how Prefect runs them."""

    buffer_depth: Annotated[int, Field(ge=0, le=DEEPEST_BUFFER)] = 2
    """Steps of rollouts in flight while the trainer trains; 0: rollouts and training alternate, without policy lag. With 0 or 1
    each step waits for its own start groups and, with storage.max_uses 1, trains on exactly these, and two CPU runs with one seed
    are equal; from 2 on it begins as soon as enough start groups are ready."""
    task_runner: Literal["threads", "dask"] = "threads"
    """Where rollouts are played: in the flow's process, or in processes of a Dask cluster (extra `dask`)."""
    dask_address: str = ""
    """Address of a Dask scheduler whose workers share the run's folder; empty: a cluster on this machine for this run."""
    dask_workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that share a step's start groups. A cluster on this machine has as many, on the cores that the trainer leaves."""


class RunSettings(Settings):
    """All settings of a training run."""

    model_config = ConfigDict(title="Training run")

    run: Annotated[str, MAY_CHANGE] = ""
    """Name of the run and of its folder under `runs_root`; empty: made from model, seed and time or flow run."""
    runs_root: Annotated[Path, MAY_CHANGE] = Path("runs")
    """Folder of all runs, state caches and made models; it may be a shared one."""
    seed: Seed = 0
    """Seed of start positions, sampling, scripted players and adapter weights."""
    steps: Annotated[int, MAY_CHANGE, Field(ge=1)] = 200
    """Training steps; each publishes one policy version."""
    inference: InferenceSettings = InferenceSettings()
    """The model and its engines."""
    tiny_model: TinyModelSettings = TinyModelSettings()
    """Recipe of the small model, used if inference.model is 'tiny'."""
    cache: CacheSettings = CacheSettings()
    """The state cache: positions from which forks start."""
    prompts: PromptSettings = PromptSettings()
    """Format of prompts and completions."""
    rollouts: RolloutSettings = RolloutSettings()
    """The rollouts of one step."""
    endpoint: Annotated[EndpointSettings, MAY_CHANGE] = EndpointSettings()
    """How endpoints among the opponents are asked."""
    storage: StorageSettings = StorageSettings()
    """Returns and the staleness budget."""
    training: TrainingSettings = TrainingSettings()
    """The GRPO step."""
    evaluation: Annotated[EvaluationSettings, MAY_CHANGE] = EvaluationSettings()
    """How playing strength is measured."""
    pipeline: Annotated[PipelineSettings, MAY_CHANGE] = PipelineSettings()
    """How rollouts and training overlap."""
    telemetry: Annotated[TelemetrySettings, MAY_CHANGE] = TelemetrySettings()
    """Where metrics are written."""
    retention: Annotated[RetentionSettings, MAY_CHANGE] = RetentionSettings()
    """How long a run keeps old files, and `entente runs clean` those of runs at rest."""

    @model_validator(mode="after")
    def _fit_own_line(self) -> "RunSettings":
        """Where all powers are the policy's, the own line stays in place unless a setting says otherwise."""
        prompts = self.prompts
        if self.rollouts.policy_powers == "all" and "own_line" not in prompts.model_fields_set:
            fitted = dict(prompts) | {"own_line": "in_place"}
            # Not in either `model_fields_set`, so that only flags on the command line override a file.
            object.__setattr__(self, "prompts", PromptSettings.model_construct(prompts.model_fields_set, **fitted))
        return self

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_root / self.run)

    @property
    def plays(self) -> str:
        """Hash of the settings that determine rows. A process on another machine plays for a run only if the hashes are equal."""
        content = self.model_dump_json(include={"seed", "tiny_model", "cache", "prompts", "rollouts"})
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def threads(self) -> tuple[int, int]:
        """CPU threads of (engine, trainer)."""
        return self.threads_if(overlap=self.pipeline.buffer_depth > 0 and not self.inference.urls)

    def threads_if(self, *, overlap: bool) -> tuple[int, int]:
        """CPU threads of (engine, trainer), which compute at the same time if `overlap`."""
        return plan_threads(cores=usable_cores(), engine=self.inference.threads, trainer=self.training.threads, overlap=overlap)
