"""The stages of a smoke test in their order, what each is told, and the result that it leaves as a JSON file.

This module imports nothing heavy: the command line reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from entente.telemetry.errors import EntenteError, InputError
from storage.json_files import kept_object

Device = Literal["cpu", "cuda"]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every stage of one smoke test is told."""

    device: Device
    model: str
    """'tiny', or a folder or hub id."""
    folder: Path
    """Everything that the test writes."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Number format: float32 on a CPU, where results are exact, else bfloat16."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def runs(self) -> Path:
        """Folder of the runs that the test trains; the tiny model lies there too."""
        return self.folder / "runs"

    def result(self, stage: str) -> Path:
        """The file of a stage's result."""
        return self.folder / "stages" / f"{stage}.json"

    def as_object(self) -> dict[str, str]:
        """Plain values for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_object(cls, given: Mapping[str, Any]) -> "Job":
        """The inverse of `as_object`."""
        return cls(device=given["device"], model=given["model"], folder=Path(given["folder"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: a function of its name, with underscores, in its module."""

    name: str
    module: Literal["engine", "trainer"]
    limit_s: float = 1800.0
    """Wall seconds after which its processes are ended; on a CPU with the tiny model a stage takes under a minute."""
    advice: str
    """What to try if it hangs, crashes, or fails without advice of its own."""


STAGES = (
    Stage(
        name="card",
        module="trainer",
        limit_s=180,
        advice="look at `nvidia-smi`, and install the vLLM and torch that your driver can run (`entente doctor`)",
    ),
    Stage(name="engine", module="engine", limit_s=3600, advice="inference.engine = 'torch'"),
    Stage(name="legal-mask", module="engine", advice="inference.engine = 'torch'"),
    Stage(name="training-step", module="trainer", advice="training.recompute = true"),
    Stage(
        name="steps",
        module="trainer",
        limit_s=7200,
        advice="inference.dtype and training.dtype alike, or inference.engine = 'torch'",
    ),
)
"""In the order of the test. Every stage needs `card`; the others need no earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The result of one stage."""

    stage: str
    passed: bool
    sentence: str
    """What was found, or why it failed."""
    advice: str = ""
    """The setting to try, if it failed."""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""
    """Last lines of its log, if it failed."""


class StageFailed(EntenteError):
    """A stage found something wrong. `advice`: the setting to try; empty: the stage's own."""

    def __init__(self, sentence: str, advice: str = "") -> None:
        super().__init__(sentence)
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a stage that passed found."""

    sentence: str
    figures: Figures = field(default_factory=dict)


def figures_so_far(job: Job) -> dict[str, Figures]:
    """Figures of the stages that have passed, by stage."""
    found = (kept_object(job.result(stage.name)) for stage in STAGES)
    return {result["stage"]: result["figures"] for result in found if result.get("passed")}


def chosen_stages(only: Sequence[str]) -> tuple[Stage, ...]:
    """All stages, or `card` and those named in `only`, in their order.

    Raises:
        InputError: `only` names a stage that does not exist.
    """
    names = [stage.name for stage in STAGES]
    if unknown := [name for name in only if name not in names]:
        raise InputError(f"there is no stage '{unknown[0]}': --only takes {', '.join(names)}")
    return tuple(stage for stage in STAGES if not only or stage.name in ("card", *only))
