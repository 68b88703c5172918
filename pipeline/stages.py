"""Staged presets: a training in stages. A stage is a list of commands that a user could type.

    runs/_staged/<name>/stages.json     the stages with their settings, what is done, and the figure after each stage
    runs/_staged/<name>/<stage>/        the model that the stage published

A stage ends with the model that it published and with a match of this model. The next stage begins with that model. A command
that was killed is given again in the form that continues it. This module starts no process.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evaluation.settings import Measure
from pipeline.run_settings import one_sentence
from pipeline.settings_file import read_settings_file
from storage.files import make_directory
from storage.json_files import read_object
from storage.run_roots import as_given
from storage.runs import MODEL_FOLDER, RunPaths, check_run_name, durable_write
from telemetry.errors import DataError, InputError
from training.imitation.work import is_begun, work_folder

STAGED_FOLDER = "_staged"
"""Folder beside the runs."""
_PRESETS = Path(__file__).with_name("presets") / "staged"
_GIB = 1 << 30


class Stage(BaseModel):
    """Commands that end with a model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    """Name of the stage and of the folder of its model."""
    commands: Annotated[list[str], Field(min_length=1)]
    """Commands of `entente` in order. {run} is the name of the training, {seed} its seed, {base} the model of the previous
    stage."""
    model: str
    """What is published, as `entente model publish` takes it."""


class StagedPreset(BaseModel):
    """Stages, what they need, and the match after each of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cores: Annotated[int, Field(ge=1)]
    """CPU cores for which the preset's hours were planned."""
    memory_gib: Annotated[float, Field(gt=0)]
    """Memory that must be free, GiB."""
    games: Annotated[int, Field(ge=7)] = 70
    """Games of the match after each stage, one seat against six of `opponents`."""
    years: Annotated[int, Field(ge=1, le=20)] = 4
    """Game years of a game."""
    opponents: str = "dumbbot"
    """A scripted player."""
    measure: Measure = "win"
    """What is compared with `target`."""
    target: float | None = None
    """The training ends after a stage whose interval lies above this value; none: after the last stage."""
    stages: Annotated[list[Stage], Field(min_length=1)]
    """In order."""

    @model_validator(mode="after")
    def _check(self) -> "StagedPreset":
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"two stages have one name among {', '.join(names)}: give each its own")
        if any("{base}" in word for word in self.stages[0].commands):
            raise ValueError(f"stage '{names[0]}' names {{base}}, but no stage comes before it")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigure:
    """How strong the model of a stage is."""

    stage: str
    hours: float
    """Hours of the commands until the stage ended, interruptions left out."""
    measure: str
    mean: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    games: int


def staged_names() -> list[str]:
    """Names of the staged presets, sorted."""
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def is_staged(preset: str) -> bool:
    """Whether `preset` names a staged preset or a file of one."""
    return preset in staged_names() or preset.endswith(".toml")


def read_staged(preset: str) -> StagedPreset:
    """The staged preset of this name, or in this TOML file.

    Raises:
        InputError: no such file, or it is no staged preset.
    """
    file = Path(preset) if preset.endswith(".toml") else _PRESETS / f"{preset}.toml"
    try:
        return StagedPreset.model_validate(read_settings_file(file))
    except ValidationError as error:
        raise InputError(f"{file.name} is no staged preset: {one_sentence(error)}") from error


def check_machine(preset: StagedPreset, *, cores: int, free_bytes: int) -> None:
    """Check that the machine can do the stages in about the time that they were planned for.

    Raises:
        InputError: names what is missing.
    """
    if cores < preset.cores:
        raise InputError(
            f"the preset was planned for {preset.cores} CPU cores, and this machine has {cores}: use --preset laptop"
        )
    if free_bytes < preset.memory_gib * _GIB:
        free = free_bytes / _GIB
        raise InputError(
            f"the preset needs {preset.memory_gib:g} GiB of free memory, and {free:.1f} GiB are free: end other programs"
        )


class Staged:
    """A training in stages, and its file."""

    def __init__(self, name: str, runs_root: Path) -> None:
        """Raises InputError: the name cannot name a folder."""
        self.name, self.runs_root = check_run_name(name), runs_root
        self.root = runs_root / STAGED_FOLDER / name
        self.file = self.root / "stages.json"
        self._record: dict[str, Any] = {}

    def begin(self, preset: StagedPreset, seed: int) -> None:
        """Write the file of a new training.

        Raises:
            InputError: there is one of this name.
        """
        if self.file.exists():
            raise InputError(f"training '{self.name}' was begun: continue it with --resume, or choose another name with --run")
        make_directory(self.root)
        self._record = {"preset": preset.model_dump(mode="json"), "seed": seed, "done": [], "seconds": 0.0, "figures": []}
        self._write()

    def resume(self) -> None:
        """Read the file.

        Raises:
            InputError: there is none.
            DataError: it is damaged.
        """
        if not self.file.is_file():
            raise InputError(f"no training '{self.name}' was begun in '{self.root.parent}': leave out --resume")
        self._record = read_object(self.file)
        try:
            assert isinstance(self._record["done"], list)
            _ = self.preset, self.figures, self._record["seconds"] + 0.0, int(self._record["seed"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.file} is damaged ({error!r}): restore it, or begin again under another name") from error

    @property
    def preset(self) -> StagedPreset:
        """The stages with which the training began."""
        return StagedPreset.model_validate(self._record["preset"])

    @property
    def figures(self) -> list[StageFigure]:
        """One for each finished stage, in order."""
        return [StageFigure(**each) for each in self._record["figures"]]

    @property
    def is_done(self) -> bool:
        """Whether the last stage has ended, or a stage has reached the target."""
        preset, figures = self.preset, self.figures
        reached = bool(figures) and preset.target is not None and figures[-1].low > preset.target
        return reached or len(figures) == len(preset.stages)

    @property
    def stage(self) -> Stage:
        """The first stage that has not ended."""
        return self.preset.stages[len(self.figures)]

    def model_of(self, stage: str) -> Path:
        """Folder of the model that a stage published."""
        return self.root / stage

    def commands(self) -> list[list[str]]:
        """Words of each command of the current stage, as they begin it."""
        before = self.figures
        base = self.model_of(before[-1].stage).as_posix() if before else ""
        return self.commands_of(self.stage, base=base, seed=self._record["seed"])

    def commands_of(self, stage: Stage, *, base: str, seed: int) -> list[list[str]]:
        """Words of each command of `stage`; the last publishes its model.

        Args:
            base: folder of the model of the stage before.
        """
        given = {"{run}": self.name, "{seed}": str(seed), "{base}": base, "{published}": self.model_of(stage.name).as_posix()}
        lines = [*stage.commands, f"model publish {stage.model} --to {{published}}"]
        return [[*_filled(line, given), "--runs-root", as_given(self.runs_root)] for line in lines]

    def match_command(self) -> list[str]:
        """Words of the match of the current stage's model; its last line is one JSON object."""
        preset = self.preset
        words = ["evaluate", "--players", self.model_of(self.stage.name).as_posix(), "--opponents", preset.opponents]
        words += ["--games", str(preset.games), "--years", str(preset.years), "--measure", preset.measure]
        return [*words, "--runs-root", as_given(self.runs_root), "--json"]

    def next_command(self) -> list[str] | None:
        """Words of the current stage's next command, or those that continue it if it was begun; None: only the match is left."""
        commands, done = self.commands(), self._record["done"]
        while len(done) < len(commands):
            words = self._continuing(commands[len(done)])
            if words is not None:
                return words
            done.append(commands[len(done)])
        return None

    def _continuing(self, words: list[str]) -> list[str] | None:
        """The words that continue a command which was begun; those given if it was not, None if nothing is left to do."""
        root = ["--runs-root", as_given(self.runs_root)]
        if words[:2] == ["model", "imitate"]:
            work = work_folder(self.runs_root / MODEL_FOLDER, words[2])
            if work.final.is_dir():
                return None
            return [*words[:3], "--resume", *root] if is_begun(work) else words
        if words[:2] == ["model", "publish"]:
            return None if self.model_of(self.stage.name).is_dir() else words
        if words[0] == "train" and "--run" in words and "--resume" not in words:
            run = words[words.index("--run") + 1]
            return ["train", "--run", run, "--resume", *root] if RunPaths(self.runs_root / run).settings.is_file() else words
        return words

    def spend(self, seconds: float) -> None:
        """Add to the time of the training. It is called while a command runs, so that a kill costs little of the count."""
        self._record["seconds"] += seconds
        self._write()

    def command_done(self, words: Sequence[str]) -> None:
        """Note that the next command has ended."""
        self._record["done"].append(list(words))
        self._write()

    def stage_done(self, match: Mapping[str, Any]) -> StageFigure:
        """Note the match of the current stage, from its JSON object."""
        preset = self.preset
        player = match["players"][0]
        found = player["measures"][preset.measure]
        figure = StageFigure(
            stage=self.stage.name,
            hours=self._record["seconds"] / 3600,
            measure=preset.measure,
            mean=found["mean"],
            low=found["low"],
            high=found["high"],
            games=player["seats"],
        )
        self._record["figures"].append(asdict(figure))
        self._record["done"] = []
        self._write()
        return figure

    def _write(self) -> None:
        durable_write(self.file, json.dumps(self._record | {"written": time.time()}, indent=1).encode())


def _filled(line: str, given: Mapping[str, str]) -> list[str]:
    """The words of a command; placeholders are filled after splitting, so that a path may hold spaces."""
    words = shlex.split(line)
    for name, value in given.items():
        words = [word.replace(name, value) for word in words]
    return words
