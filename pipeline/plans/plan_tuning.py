"""The plan of a tuning flow: candidates, refused candidates, folder of results, and results that exist.

Nothing is started, downloaded or written. `entente bench tune --dry-run` prints the plan.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from decoding.model_files import model_fingerprint
from inference.engine_cards import engine_cards
from inference.memory_plan import Machine, ModelShape, check_memory, this_machine
from inference.settings import InferenceSettings
from pipeline.plans.find_model import TINY, check_length, model_here, model_shape
from pipeline.refresh_settings import newest_run
from pipeline.run_settings import RunSettings, check_settings, layered_settings, settings_of
from pipeline.tuning_folder import read_result
from records.policy_version import PolicyVersion
from storage.adapters import published_versions, read_adapter
from storage.runs import RunPaths
from telemetry.cards import CardPlan
from tuning.candidates import Candidate, candidates_of, refused, varied_axes
from tuning.outputs import as_config
from tuning.requests import check_shape
from tuning.settings import TuneSettings

TUNING_FOLDER = "_tuning"
"""Folder under `runs_root`."""
NEWEST = "newest"
_GUESS_S = 30.0
"""Seconds per candidate, if none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """What a tuning flow will measure."""

    settings: RunSettings
    run: str
    """Run whose requests are used; empty: random requests."""
    folder: Path
    candidates: list[Candidate]
    refused: dict[str, str]
    """Key of a candidate -> why it is not started."""
    varied: list[str]
    """Names of the settings that vary."""
    adapter: PolicyVersion | None
    """Newest adapter of the run; None: random weights."""
    adapter_rank: int
    on_gpu: bool

    def missing(self, *, retry_failed: bool) -> list[Candidate]:
        """Candidates without a result, and with `retry_failed` also those whose measurement failed."""
        missing = []
        for candidate in self.candidates:
            if candidate.key in self.refused:
                continue
            result = read_result(self.folder, candidate)
            if result is None or (retry_failed and not result.arms):
                missing.append(candidate)
        return missing

    def seconds_each(self) -> float:
        """Mean seconds per candidate, from existing results."""
        results = [read_result(self.folder, candidate) for candidate in self.candidates]
        seconds = [result.seconds for result in results if result is not None and result.arms]
        return sum(seconds) / len(seconds) if seconds else _GUESS_S


def plan_tuning(run: str, settings: RunSettings | None, tuning: TuneSettings, runs_root: Path, output: Path | None) -> TuningPlan:
    """The plan of a tuning flow.

    Args:
        run: a run's name, NEWEST, or empty for random requests.
        settings: None: those of the run, or of the laptop preset.
        output: folder of the results; None: a folder under `runs_root`.

    Raises:
        InputError: there is no such run, or settings contradict each other or do not fit the model.
    """
    run, settings = settings_for(run, settings, runs_root)
    base = settings.inference
    machine = this_machine(CardPlan(engine=engine_cards(base)))
    shape = model_shape(base.model, settings.tiny_model, settings.prompts)
    check_length(base, shape, base.model)
    if not run:
        check_shape(tuning, max_model_length=base.max_model_length)
    adapter = _adapter(RunPaths(runs_root / run)) if run else None
    rank = settings.training.lora_rank
    candidates = candidates_of(base, tuning, on_gpu=machine.gpu_total > 0)
    label = run or ("random" if base.model == TINY else f"random-{Path(base.model).name.lower()}")
    return TuningPlan(
        settings=settings,
        run=run,
        folder=output or runs_root / TUNING_FOLDER / label,
        candidates=candidates,
        refused=refused(candidates, partial(_fits, shape, machine), adapter_rank=rank),
        varied=varied_axes(candidates),
        adapter=adapter,
        adapter_rank=rank,
        on_gpu=machine.gpu_total > 0,
    )


def settings_for(run: str, settings: RunSettings | None, runs_root: Path) -> tuple[str, RunSettings]:
    """The run's name and the settings to vary, with an engine on this machine.

    Raises:
        InputError: there is no such run, or settings contradict each other.
    """
    run = newest_run(runs_root) if run == NEWEST else run
    own = settings_of(RunPaths(runs_root / run)) if run else layered_settings("laptop")
    settings = settings or own
    here = settings.inference.model_copy(update={"urls": (), "evaluation_urls": ()})
    settings = settings.model_copy(update={"runs_root": runs_root, "inference": here})
    check_settings(settings)
    return run, settings


def _fits(shape: ModelShape | None, machine: Machine, settings: InferenceSettings) -> None:
    check_memory(shape, settings, machine=machine)


def _adapter(paths: RunPaths) -> PolicyVersion | None:
    versions = [version for version in published_versions(paths) if version]
    return read_adapter(paths, versions[-1]) if versions else None


def identity_of(plan: TuningPlan, model: Path, tuning: TuneSettings) -> dict[str, Any]:
    """What all results in one folder have in common; stored in the folder."""
    identity: dict[str, Any] = {"requests_of": plan.run or "nobody: random", "requests": tuning.asked, "rounds": tuning.rounds}
    if not plan.run:
        identity |= {
            name: getattr(tuning, name) for name in ("random_prompt_tokens", "random_completion_tokens", "random_shared")
        }
    return identity | {
        "seed": tuning.seed,
        "base_model": model_fingerprint(model),
        "adapter": plan.adapter.adapter_hash if plan.adapter else f"random weights of rank {plan.adapter_rank}",
        **as_config(plan.settings.inference),
    }


def describe_plan(plan: TuningPlan, tuning: TuneSettings) -> dict[str, Any]:
    """The plan as `--dry-run` prints it."""
    missing = {each.key for each in plan.missing(retry_failed=tuning.retry_failed)}
    seconds = plan.seconds_each()

    def state(candidate: Candidate) -> str:
        if candidate.key in plan.refused:
            return f"refused: {plan.refused[candidate.key]}"
        return "to be measured" if candidate.key in missing else "measured before"

    model = plan.settings.inference.model
    found = model == TINY or model_here(model) is not None
    return {
        "command": "bench tune",
        "requests": {
            "of": plan.run or "no run: random requests",
            "each_pass": tuning.asked,
            "passes_of_a_candidate": tuning.passes,
            "model": model if found else f"{model}, to be downloaded first",
            "adapter": f"policy version {plan.adapter.version}"
            if plan.adapter
            else f"random weights of rank {plan.adapter_rank}",
        },
        "candidates": {
            f"{number} {candidate.label(plan.varied)}": state(candidate)
            for number, candidate in enumerate(plan.candidates, start=1)
        },
        "time": {
            "left_s": round(seconds * len(missing)),
            "basis": "those measured before"
            if seconds != _GUESS_S
            else f"a guess of {_GUESS_S:g} s each, because none is measured",
        },
        "files": {"folder": str(plan.folder)},
    }
