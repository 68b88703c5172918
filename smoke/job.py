"""The stages of a smoke test in their order, what each is told, and the result that it leaves as a JSON file.

This module imports nothing heavy: the command line reads it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from telemetry.errors import EntenteError, InputError

Device = Literal["cpu", "cuda"]
State = Literal["passed", "failed", "not run"]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every stage of one smoke test is told."""

    device: Device
    model: str
    """Folder or hub id of a model; empty: a model is made in the shape `shape`."""
    shape: str
    """One of SHAPES."""
    folder: Path
    """Everything that the test writes."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Number format: float32 on a CPU, where results are exact, else bfloat16."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def drawn(self) -> Path:
        """Rows that the stage `legal-mask` drew (`smoke/rows.py`)."""
        return self.folder / "drawn.npz"

    @property
    def runs(self) -> Path:
        """Folder of the runs that the test trains; the tiny model lies there too."""
        return self.folder / "runs"

    @property
    def preset(self) -> Path:
        """The recommended settings."""
        return self.folder / "preset.toml"

    def result(self, stage: str) -> Path:
        """The file of a stage's result."""
        return self.folder / "stages" / f"{stage}.json"

    def as_object(self) -> dict[str, str]:
        """Plain values for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_object(cls, given: Mapping[str, Any]) -> "Job":
        """The inverse of `as_object`."""
        return cls(device=given["device"], model=given["model"], shape=given["shape"], folder=Path(given["folder"]))


SHAPES = {"tiny": "tiny", "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct"}
"""Models that the test can make, the product's tiny one or random weights in the shape of a real one -> the model to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. Its module is `smoke.stages.<name>`, with underscores."""

    name: str
    title: str
    needs: tuple[str, ...] = ("model",)
    """Stages that must have passed before."""
    limit_s: float = 900.0
    """Wall seconds after which its processes are ended; on a CPU with the tiny model a stage takes under a minute."""
    advice: str
    """What to try if it hangs, crashes, or fails without advice of its own."""

    @property
    def module(self) -> str:
        """Import path of its module."""
        return f"smoke.stages.{self.name.replace('-', '_')}"


STAGES = (
    Stage(
        name="card",
        title="card and driver",
        needs=(),
        limit_s=180,
        advice="look at `nvidia-smi`, and install the vLLM and torch that your driver can run (`entente doctor`)",
    ),
    Stage(name="model", title="model", needs=("card",), limit_s=1800, advice="give --model a folder, or free disk space"),
    Stage(name="engine", title="engine start and rates", limit_s=1800, advice="inference.enforce_eager = 'on'"),
    Stage(name="legal-mask", title="legal mask against its oracle", limit_s=1800, advice="inference.engine = 'torch'"),
    Stage(name="jump", title="jump on and off", limit_s=1800, advice="inference.jump_forced = 'off'"),
    Stage(name="seeds", title="seeds", advice="inference.jump_forced = 'off'"),
    Stage(name="adapters", title="slots and merged", limit_s=2400, advice="inference.adapters = 'merge_reload'"),
    Stage(name="attention", title="attention kinds against padded", needs=("legal-mask",), advice="training.layout = 'padded'"),
    Stage(name="training-step", title="training step", limit_s=2400, advice="training.recompute = true"),
    Stage(
        name="mismatch",
        title="mismatch quantiles",
        needs=("legal-mask",),
        advice="inference.dtype and training.dtype alike",
    ),
    Stage(name="shared-card", title="shared card", limit_s=1800, advice="inference.gpu_memory_share = 0.3"),
    Stage(name="steps", title="three real steps", needs=("mismatch",), limit_s=3600, advice="inference.engine = 'torch'"),
    Stage(name="resume", title="a kill and a resume", needs=("steps",), limit_s=3600, advice="pipeline.buffer_depth = 0"),
)
"""In the order of the test: what later stages rest on comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """The result of one stage."""

    stage: str
    state: State
    sentence: str
    """What was found, or why it failed, in one sentence."""
    attempt: str = ""
    """The setting to try, if it failed; "try" in JSON."""
    figures: Figures = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the product refuses here by design, and the like."""
    seconds: float = 0.0
    log: str = ""
    """Last lines of its log, if it failed."""
    key: str = ""
    """Hash of what the result holds for: stage, settings, versions and card."""

    @property
    def passed(self) -> bool:
        """Whether it passed."""
        return self.state == "passed"

    def as_object(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        return {"stage": self.stage, "passed": self.passed, "try": plain.pop("attempt"), **plain}

    @classmethod
    def from_object(cls, given: Mapping[str, Any]) -> "StageResult":
        """The inverse of `as_object`."""
        plain = {name: value for name, value in given.items() if name not in ("passed", "try")}
        return cls(**plain | {"attempt": given["try"], "notes": tuple(given["notes"])})


class StageFailed(EntenteError):
    """A stage found something wrong."""

    def __init__(self, sentence: str, attempt: str = "", figures: Figures | None = None) -> None:
        """`attempt`: the setting to try; empty: the stage's own advice."""
        super().__init__(sentence)
        self.attempt, self.figures = attempt, dict(figures or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a stage that passed found."""

    sentence: str
    figures: Figures = field(default_factory=dict)
    notes: Sequence[str] = ()


def read_result(file: Path) -> StageResult | None:
    """The stored result of a stage; None if there is none, or a killed process left a part of one."""
    try:
        return StageResult.from_object(json.loads(file.read_bytes()))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def figures_so_far(job: Job) -> dict[str, Figures]:
    """Figures of the stages that have passed, by stage."""
    found = (read_result(job.result(stage.name)) for stage in STAGES)
    return {result.stage: result.figures for result in found if result is not None and result.passed}


def chosen_stages(only: Sequence[str]) -> tuple[Stage, ...]:
    """All stages, or those named in `only` with what they need, in their order.

    Raises:
        InputError: `only` names a stage that does not exist.
    """
    by_name = {stage.name: stage for stage in STAGES}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise InputError(f"there is no stage '{unknown[0]}': --only takes {', '.join(by_name)}")
    wanted = set(only or by_name)
    for stage in reversed(STAGES):
        if stage.name in wanted:
            wanted |= set(stage.needs)
    return tuple(stage for stage in STAGES if stage.name in wanted)
