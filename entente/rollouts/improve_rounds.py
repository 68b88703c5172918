"""Rounds of improvement: their settings, and the two files that record a round's state.

    <run>/improve/round-0001.json           its settings and its student, written at its start
    <run>/improve/round-0001.result.json    its figures, written at its end

Shards, distillation targets, ledgers and checkpoints record its progress. This module neither plays, labels nor trains.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from entente.players.search import check_search
from entente.players.search_settings import SearchSettings
from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import Settings
from storage.json_files import read_object, write_json
from storage.runs import RunPaths


class ImproveSettings(Settings):
    """Rounds in which a run's student learns from a search on the positions that it reaches."""

    rounds: Annotated[int, Field(ge=1)] = 1
    """Total rounds of the run; completed ones are not repeated."""
    positions: Annotated[int, Field(ge=1)] = 512
    """Positions that the search labels per round."""
    distil_targets_per_step: Annotated[int, Field(ge=1)] = 64
    """Distillation targets per training step."""
    uses: Annotated[int, Field(ge=1)] = 2
    """Maximum number of steps that train on a distillation target."""
    temperature: Annotated[float, Field(ge=0)] = 0.25
    """Temperature of the teacher's distribution, in units of search.value; 0: the best order set alone."""
    rollouts: bool = False
    """Train each step on new start groups of the run too, played by its newest version."""
    search: SearchSettings = SearchSettings()
    """The teacher."""

    @property
    def each_round(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"rounds"})

    @property
    def teacher(self) -> dict[str, Any]:
        """The settings on which the teacher's answers depend."""
        return self.model_dump(mode="json", include={"temperature", "search"})

    @property
    def steps(self) -> int:
        """Most steps of a round; a step uses a distillation target once."""
        return max(self.uses, -(-self.positions * self.uses // self.distil_targets_per_step))


def round_name(number: int) -> str:
    return f"round-{number:04d}"


def check_improve(improve: ImproveSettings, thinking_tokens: int) -> None:
    """Raise an InputError if a run with this budget for thoughts cannot learn from this teacher."""
    check_search(improve.search)
    if thinking_tokens:
        raise InputError("a teacher answers without thoughts, and this run's model thinks (prompts.thinking_tokens): use another")


def rounds_left(paths: RunPaths, improve: ImproveSettings) -> list[int]:
    return [number for number in range(1, improve.rounds + 1) if not _file(paths, number, ".result").exists()]


def open_rounds(paths: RunPaths, improve: ImproveSettings) -> list[int]:
    """The rounds that are left; raises an InputError if one of them started with other settings."""
    left = rounds_left(paths, improve)
    for number in left:
        file = _file(paths, number)
        if not file.exists():
            continue
        stored = read_object(file)["settings"]
        if changed := [name for name, value in improve.each_round.items() if stored.get(name) != value]:
            before = ", ".join(f"{name} {json.dumps(stored.get(name))}" for name in changed)
            raise InputError(
                f"round {number} of run '{paths.root.name}' started with {before}: keep these settings until it is done"
            )
    return left


def begin_round(paths: RunPaths, number: int, improve: ImproveSettings, student: PolicyVersion) -> None:
    if not (file := _file(paths, number)).exists():
        write_json(file, {"round": number, "student": str(student), "settings": improve.each_round})


def check_student(paths: RunPaths, number: int, student: PolicyVersion) -> None:
    """Raise an InputError if the run was trained since the round started."""
    if (before := read_object(_file(paths, number))["student"]) != str(student):
        raise InputError(
            f"round {number} of run '{paths.root.name}' started labelling for {before}, and the run now has {student}: remove "
            f"'{_file(paths, number)}', 'distil_targets/{round_name(number)}' and 'shards/visit-{round_name(number)}' "
            "to restart it"
        )


def end_round(paths: RunPaths, number: int, figures: Mapping[str, Any]) -> None:
    write_json(_file(paths, number, ".result"), figures)


def results(paths: RunPaths, improve: ImproveSettings) -> list[dict[str, Any]]:
    files = (_file(paths, number, ".result") for number in range(1, improve.rounds + 1))
    return [read_object(file) for file in files if file.exists()]


def _file(paths: RunPaths, number: int, suffix: str = "") -> Path:
    return paths.improve / f"{round_name(number)}{suffix}.json"
