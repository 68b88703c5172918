"""The settings tree of a run: each room's settings under its name, checked against one another.

Layers, later ones win: a preset, then TOML files, then command-line flags. The resolved tree is written beside the run.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evaluation.settings import EvaluationSettings
from game.players import check_player
from game.prompt_settings import PromptSettings
from inference.settings import InferenceSettings
from pipeline.removed_settings import without_removed
from pipeline.setting_names import setting_names, similar_names
from pipeline.settings_file import read_settings_file
from pipeline.simulated_settings import LEARNING_RATE_MAX, SimulatedSettings
from pipeline.threads import plan_threads, usable_cores
from rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from storage.lineages import lineage_at
from storage.retention import RetentionSettings
from storage.rewards import check_blend
from storage.runs import RunPaths, check_name, check_run_name, resolve_run
from storage.settings import StorageSettings
from telemetry.alerts import AlertSettings
from telemetry.errors import InputError
from telemetry.setting_marks import MAY_CHANGE, MAY_CHANGE_IN_A_FORK, ChangeRule, change_rule
from telemetry.sinks import TelemetrySettings
from training.loss_name import check_loss_name
from training.settings import TinyModelSettings, TrainingSettings

CACHE_FOLDER, MODEL_FOLDER = "_state_cache", "_models"
"""Beside the runs, under `runs_root`: state caches, and models made on the spot."""
_PRESETS = Path(__file__).with_name("presets")


class PipelineSettings(BaseModel):
    """How rollouts and training are interleaved, and what Prefect is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    buffer_depth: Annotated[int, Field(ge=0, le=64)] = 2
    """Steps of rollouts in flight while the trainer trains; 0 alternates the two: no policy lag."""
    ready_groups_max: Annotated[int, Field(ge=0)] = 0
    """Advantage groups left ready for later steps at which rollouts pause: none run ahead, and every other step plays none of its
    own. 0: no bound; a step plays about as much as it trains on anyway."""
    full_disk_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds for which finished rollouts wait in memory for room on a full disk, before the run ends, to be resumed."""
    deterministic: bool = False
    """One rollout task a step and nothing decided by measured time, so that a seed repeats a whole CPU run. Needs a buffer_depth
    of 0, or of 1: the next step's rollouts are then all of the version before the one in training, whoever is faster."""
    groups_per_task: Annotated[int, Field(ge=0)] = 0
    """Start groups per rollout task; 0: as many as keep Prefect's cost under 2 %, from measured times."""
    producers_min: Annotated[int, Field(ge=0, le=64)] = 0
    """Rollout producers on further workers that play for the run from its beginning."""
    producers_max: Annotated[int, Field(ge=0, le=64)] = 0
    """Rollout producers that may be started while the trainer waits for rollouts; at least producers_min."""
    task_runner: Literal["threads", "dask"] = "threads"
    """Where the flow's own rollouts are played: beside it in its process, or by processes of a Dask cluster (extra `dask`), each
    with an engine of its own or the workers of inference.urls."""
    dask_address: str = ""
    """Address of a running Dask scheduler, such as 'tcp://10.0.0.5:8786', whose workers share the run's folder; empty: a cluster
    on this machine, for as long as the run."""
    dask_workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes of the cluster on this machine; they share the cores that the trainer leaves."""
    rollout_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds until a rollout task is given up and retried."""
    recoveries_max: Annotated[int, Field(ge=0, le=100)] = 3
    """Times in a row that a deployment's run which was lost is started again at the same step, before an alert; 0: never."""


class RunSettings(BaseModel):
    """Everything that shapes a training run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Training run")

    run: Annotated[str, MAY_CHANGE] = ""
    """Name of the run, its folder under `runs_root`; empty: model, seed and time."""
    runs_root: Annotated[Path, MAY_CHANGE] = Path("runs")
    """Folder of all runs, of the state caches and of made models."""
    seed: int = 0
    """Seed of start positions, draws, opponents' dice and adapter weights."""
    steps: Annotated[int, MAY_CHANGE, Field(ge=1)] = 200
    """Training steps; each publishes one policy version."""
    inference: InferenceSettings = InferenceSettings()
    """The model that plays, and where."""
    tiny_model: TinyModelSettings = TinyModelSettings()
    """Recipe of the model made on the spot, used where inference.model is 'tiny'."""
    cache: CacheSettings = CacheSettings()
    """Frozen positions that forks start from."""
    prompts: PromptSettings = PromptSettings()
    """How prompts and answers are written, in imitation, play and evaluation alike."""
    rollouts: Annotated[RolloutSettings, MAY_CHANGE_IN_A_FORK] = RolloutSettings()
    """What one step plays."""
    storage: Annotated[StorageSettings, MAY_CHANGE_IN_A_FORK] = StorageSettings()
    """Returns and the staleness budget."""
    training: Annotated[TrainingSettings, MAY_CHANGE_IN_A_FORK] = TrainingSettings()
    """The GRPO step."""
    evaluation: Annotated[EvaluationSettings, MAY_CHANGE] = EvaluationSettings()
    """How strength is measured, before and after."""
    pipeline: Annotated[PipelineSettings, MAY_CHANGE] = PipelineSettings()
    """How it is interleaved."""
    simulated: SimulatedSettings = SimulatedSettings()
    """Rollouts that are replayed from an earlier run instead of being played, to measure everything but the engine."""
    telemetry: Annotated[TelemetrySettings, MAY_CHANGE] = TelemetrySettings()
    """Where figures go."""
    alerts: Annotated[AlertSettings, MAY_CHANGE] = AlertSettings()
    """When the run calls for help, and how."""
    retention: Annotated[RetentionSettings, MAY_CHANGE] = RetentionSettings()
    """How long what grows is kept; a run at work lets old adapters go, `entente runs clean` all the rest."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, tree: Any) -> Any:
        return without_removed(tree)

    @property
    def paths(self) -> RunPaths:
        """The run's folder."""
        return RunPaths(self.runs_root / self.run)

    @property
    def threads(self) -> tuple[int, int]:
        """CPU threads of engine and trainer."""
        return plan_threads(
            cores=usable_cores(),
            engine=self.inference.threads,
            trainer=self.training.threads,
            overlap=self.pipeline.buffer_depth > 0 and not self.inference.urls,
        )


def preset_names() -> list[str]:
    """Presets that ship."""
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def layered_settings(preset: str, files: Iterable[Path] = (), overrides: Mapping[str, Any] | None = None) -> RunSettings:
    """Settings from a preset, TOML files and overrides, in rising precedence, checked.

    Raises:
        InputError: unknown preset, unreadable file, unknown or impossible setting, or settings that contradict each other.
    """
    if preset not in preset_names():
        raise InputError(f"there is no preset '{preset}'; known: {', '.join(preset_names())}")
    layers = [read_settings_file(_PRESETS / f"{preset}.toml"), *(read_settings_file(file) for file in files), overrides or {}]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merged(merged, layer)
    try:
        settings = RunSettings.model_validate(merged)
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_settings(settings)
    check_objective(settings)
    return settings


def resumed_settings(
    files: Iterable[Path] = (), overrides: Mapping[str, Any] | None = None, *, fork: bool = False
) -> RunSettings:
    """Settings of a run that is to go on: its own, with files and overrides laid over them.

    Args:
        fork: in a lineage of its own, where more may change.

    Raises:
        InputError: no run is named, it is not there, or something that its rows and weights rest on would change.
    """
    wished: dict[str, Any] = {}
    for layer in [*(read_settings_file(file) for file in files), overrides or {}]:
        wished = _merged(wished, layer)
    run, root = wished.get("run"), wished.get("runs_root", "runs")
    if not run or not isinstance(run, str):
        raise InputError("--resume goes on with a run that exists: name it with --run")
    if not isinstance(root, str | Path):
        raise InputError(f"runs_root: input is not a path, got {root!r}")
    root = Path(root)
    wished["run"] = run = resolve_run(root, run)
    stored = settings_of(RunPaths(root / check_name(run, "run")))
    try:
        settings = RunSettings.model_validate(_merged(stored.model_dump(), {**wished, "runs_root": root}))
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_resumed(stored, settings, fork=fork)
    check_settings(settings)
    check_objective(settings)
    return settings


def changed_settings(stored: RunSettings, wanted: RunSettings) -> dict[str, list[Any]]:
    """Settings that differ and shape rows or weights, by their dotted names: [before, after]."""
    before, after = _leaves(stored.model_dump(mode="json")), _leaves(wanted.model_dump(mode="json"))
    differ = (name for name in before | after if before.get(name) != after.get(name))
    return {name: [before.get(name), after.get(name)] for name in differ if _rule(name) is not MAY_CHANGE}


def _rule(name: str) -> ChangeRule:
    return change_rule(RunSettings, name.split("."))


def check_resumed(stored: RunSettings, wanted: RunSettings, *, fork: bool = False) -> None:
    """Refuse to go on with a run under settings that would make it another run, or in a `fork` would not fit its checkpoint.

    Raises:
        InputError: names the first such setting, both values, and the cure.
    """
    for name, (before, after) in changed_settings(stored, wanted).items():
        forkable = _rule(name) is MAY_CHANGE_IN_A_FORK
        if not (fork and forkable):
            cure = "leave it out, go on in a lineage of its own with --fork-lineage NAME," if forkable else "leave it out,"
            raise InputError(
                f"run '{stored.run}' was started with {name} {before!r} and cannot continue with {after!r}: "
                f"{cure} or begin another run"
            )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tree's values by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def settings_of(paths: RunPaths) -> RunSettings:
    """The resolved settings of a run that exists; its name, its root and a model beside it are those of where it lies now.

    Raises:
        InputError: there is no such run.
    """
    if not paths.settings.is_file():
        others = sorted(path.parent.name for path in paths.root.parent.glob("*/settings.json"))
        there = f"; runs there: {', '.join(others[-5:])}" if others else ""
        raise InputError(f"there is no run in '{paths.root}': it has no settings.json{there}")
    try:
        return _as_it_lies(_stored_settings(paths.settings, paths), paths)
    except ValidationError as error:
        raise InputError(f"'{paths.settings}' is not of this version or was changed: {one_sentence(error)}") from error
    except ValueError as error:
        raise InputError(f"'{paths.settings}' cannot be used: {error}") from error


def _stored_settings(file: Path, paths: RunPaths) -> RunSettings:
    return RunSettings.model_validate(without_removed(json.loads(file.read_bytes()), stored=paths.root.name))


def _as_it_lies(settings: RunSettings, paths: RunPaths) -> RunSettings:
    """Settings of a run that may have been copied from elsewhere."""
    root, model = paths.root.parent, settings.inference.model
    if settings.runs_root.parts and Path(model).is_relative_to(settings.runs_root):
        copied = root / Path(model).relative_to(settings.runs_root)
        model = str(copied) if copied.is_dir() else model
    inference = settings.inference.model_copy(update={"model": model})
    return settings.model_copy(update={"run": paths.root.name, "runs_root": root, "inference": inference})


def settings_at(paths: RunPaths, step: int) -> RunSettings:
    """The settings under which a step was, or will be, made: a run may have forked since."""
    settings = settings_of(paths)
    left = paths.ledger / lineage_at(paths, step) / "settings.json"
    return _as_it_lies(_stored_settings(left, paths), paths) if left.is_file() else settings


def check_settings(settings: RunSettings) -> None:
    """Refuse settings that contradict one another, naming both values and the cure.

    Raises:
        InputError: they do.
    """
    pipeline, storage = settings.pipeline, settings.storage
    if settings.run:
        check_run_name(settings.run)
    if "\0" in str(settings.runs_root):
        raise InputError(f"runs_root {str(settings.runs_root)!r} cannot name a folder: no name holds a zero byte")
    if pipeline.buffer_depth > storage.max_policy_lag:
        raise InputError(
            f"pipeline.buffer_depth {pipeline.buffer_depth} exceeds storage.max_policy_lag {storage.max_policy_lag}: "
            f"rows would be rolled out to be thrown away; set buffer_depth to at most {storage.max_policy_lag}, "
            "or raise max_policy_lag"
        )
    if pipeline.producers_min > pipeline.producers_max:
        raise InputError(
            f"pipeline.producers_min {pipeline.producers_min} exceeds pipeline.producers_max {pipeline.producers_max}: "
            "lower the one or raise the other"
        )
    if pipeline.dask_address and pipeline.task_runner != "dask":
        raise InputError(
            f"pipeline.dask_address '{pipeline.dask_address}' is for pipeline.task_runner 'dask', not "
            f"'{pipeline.task_runner}': set one of the two"
        )
    if pipeline.deterministic and pipeline.buffer_depth > 1:
        raise InputError(
            f"pipeline.deterministic needs pipeline.buffer_depth 0 or 1, not {pipeline.buffer_depth}: "
            "steps further ahead end in any order; set one of the two"
        )
    if pipeline.deterministic and pipeline.buffer_depth and pipeline.ready_groups_max:
        raise InputError(
            f"pipeline.ready_groups_max {pipeline.ready_groups_max} would pause rollouts, which pipeline.deterministic with "
            "pipeline.buffer_depth 1 begins before it is known what lies ready: set buffer_depth to 0, or ready_groups_max to 0"
        )
    for name in {
        *settings.rollouts.scripted_opponents,
        *settings.evaluation.opponents,
        settings.tiny_model.teacher,
        *settings.cache.players,
    }:
        check_player(name)
    wanted, held_out = settings.evaluation.positions, settings.cache.held_out_snapshots
    if wanted > held_out:
        raise InputError(
            f"evaluation.positions {wanted} exceeds cache.held_out_snapshots {held_out}: lower the one or raise the other"
        )
    _check_slots(settings)
    _check_simulated(settings)
    _ = settings.threads


def check_objective(settings: RunSettings) -> None:
    """Refuse a loss or a reward that is neither ours nor brought by an installed package; a loss is not loaded for this.

    Raises:
        InputError: names it, its package if there is one, and the cure.
    """
    check_blend(settings.storage.blend)
    check_loss_name(settings.training.loss)


def _check_simulated(settings: RunSettings) -> None:
    source, rate = settings.simulated.from_run, settings.training.learning_rate
    if not source:
        return
    check_name(source, "simulated.from_run")
    if rate > LEARNING_RATE_MAX:
        raise InputError(
            f"simulated.from_run replays what the base drew, and training.learning_rate {rate:g} would train another policy: "
            f"set learning_rate to at most {LEARNING_RATE_MAX:g}"
        )
    if settings.inference.urls or settings.inference.evaluation_urls:
        raise InputError("simulated.from_run does without an engine: leave inference.urls and inference.evaluation_urls out")


def _check_slots(settings: RunSettings) -> None:
    frozen = bool(settings.rollouts.frozen_share and settings.rollouts.frozen_version)
    inference, needed = settings.inference, settings.storage.max_policy_lag + 2 + frozen
    if inference.adapters == "merge_reload":
        return
    if settings.training.lora_rank > inference.adapter_rank:
        raise InputError(
            f"training.lora_rank {settings.training.lora_rank} exceeds inference.adapter_rank {inference.adapter_rank}: "
            f"set adapter_rank to {settings.training.lora_rank}"
        )
    if inference.adapter_slots < needed:
        raise InputError(
            f"inference.adapter_slots {inference.adapter_slots} cannot hold the versions that storage.max_policy_lag "
            f"{settings.storage.max_policy_lag} keeps in play: set adapter_slots to at least {needed}"
        )


def one_sentence(error: ValidationError) -> str:
    """The first complaint of pydantic, with the setting's dotted name; how many more there are."""
    first, *others = error.errors()
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = tuple(setting_names(RunSettings)) if error.title == RunSettings.model_config.get("title") else ()
        meant = " or ".join(similar_names(name, known))
        text = f"there is no setting '{name}'" + (f"; did you mean {meant}?" if meant else "")
    elif first["type"] == "value_error":
        # A settings class's own rule says it all; the whole table that it looked at would only drown it.
        text = f"{name}: {first.get('ctx', {}).get('error', first['msg'])}".removeprefix(": ")
    else:
        text = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first.get('input')!r}"
    return text + (f" (and {len(others)} more)" if others else "")


def _merged(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in layer.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
