"""The stages of a smoke test, their input, and their results as JSON files. No heavy imports: the command line loads it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from entente.telemetry.errors import EntenteError, InputError
from storage.json_files import kept_object

Device = Literal["cpu", "cuda"]
Figures = Mapping[str, float]
LONGEST: Mapping[Device, int] = {"cuda": 2048, "cpu": 512}
"""Tokens of the longest sequence, if the model has as many positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    device: Device
    model: str
    """'tiny', or a folder or hub id."""
    folder: Path

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def result(self, stage: str) -> Path:
        return self.folder / "stages" / f"{stage}.json"

    def as_object(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_object(cls, values: Mapping[str, Any]) -> "Job":
        return cls(device=values["device"], model=values["model"], folder=Path(values["folder"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: the function in `module` with its name, in snake case."""

    name: str
    module: Literal["engine", "trainer"]
    limit_s: float = 1800.0
    """Timeout in wall seconds; on a CPU with the tiny model a stage takes less than a minute."""
    advice: str
    """What to try if the stage hangs, crashes, or fails without specific advice."""


STAGES = (
    Stage(
        name="card",
        module="trainer",
        limit_s=180,
        advice="look at `nvidia-smi`, and install the vLLM and torch that your driver can run (`entente doctor`)",
    ),
    Stage(name="engine", module="engine", limit_s=3600, advice="inference.engine = 'torch'"),
    Stage(name="legal-mask", module="engine", advice="inference.engine = 'torch'"),
    Stage(name="attention", module="trainer", advice="training.attention = 'ranges', the default"),
    Stage(name="training-step", module="trainer", advice="training.gradient_checkpointing = true"),
    Stage(
        name="steps",
        module="trainer",
        limit_s=7200,
        advice="inference.dtype and training.dtype alike, or inference.engine = 'torch'",
    ),
)
"""In order of execution. Every stage requires `card`, and no other stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    stage: str
    passed: bool
    sentence: str
    advice: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""


class StageFailed(EntenteError):
    """A check of a stage failed. `advice`: the setting to try; empty: `Stage.advice`."""

    def __init__(self, sentence: str, advice: str = "") -> None:
        super().__init__(sentence)
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    sentence: str
    figures: Figures = field(default_factory=dict)


def figures_so_far(job: Job) -> dict[str, Figures]:
    results = (kept_object(job.result(stage.name)) for stage in STAGES)
    return {result["stage"]: result["figures"] for result in results if result.get("passed")}


def chosen_stages(only: Sequence[str]) -> tuple[Stage, ...]:
    """All stages, or `card` and those in `only`. Raises InputError if `only` names an unknown stage."""
    names = [stage.name for stage in STAGES]
    if unknown := [name for name in only if name not in names]:
        raise InputError(f"there is no stage '{unknown[0]}': --only takes {', '.join(names)}")
    return tuple(stage for stage in STAGES if not only or stage.name in ("card", *only))
