"""The settings and the plan of a base model that imitates a teacher. Nothing is played, trained or written here."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from game.board import Board
from game.players import SEARCHES
from pipeline.plans.find_model import tiny_shape
from pipeline.plans.plan_run import Forecast, free_bytes
from pipeline.run_settings import merge_layers, one_sentence
from pipeline.search_teacher import DECISION_S, SearchTeacher
from pipeline.settings_file import read_settings_file
from pipeline.threads import usable_cores
from telemetry.errors import InputError
from training.imitation.settings import ImitationSettings
from training.imitation.teacher_games import TEACHER_FOLDER, missing_games
from training.imitation.work import WorkFolder, begun_settings, check_new, is_begun
from training.settings import TinyModelSettings

_POSITIONS_A_GAME = 32
"""Phases of a scripted game up to 1907, about."""
_DECISIONS_A_YEAR = 19
"""Decisions of all powers in a year of a game between searching players, about."""


def imitation_settings(work: WorkFolder, files: Iterable[Path], flags: Mapping[str, Any], *, resume: bool) -> ImitationSettings:
    """The checked settings of a model: TOML files, then flags; of one that is resumed its own.

    Raises:
        InputError: a setting cannot be used, the name is taken, or there is nothing to resume.
    """
    files = list(files)
    if resume:
        if files or flags:
            raise InputError("a model that is resumed keeps its settings: leave out --config and all settings")
        return begun_settings(work)
    tree: dict[str, Any] = {}
    for layer in [*map(read_settings_file, files), flags]:
        tree = merge_layers(tree, layer)
    try:
        settings = ImitationSettings.model_validate(tree)
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_new(work)
    return settings


def plan_imitation(work: WorkFolder, settings: ImitationSettings, runs_root: Path) -> Forecast:
    """The plan of making a model."""
    sizes = TinyModelSettings(vocabulary=settings.vocabulary, hidden=settings.hidden, layers=settings.layers)
    shape = tiny_shape(sizes, settings.prompts)
    to_play = 0 if settings.recorded else missing_games(runs_root / TEACHER_FOLDER, settings, SearchTeacher())
    position_bytes = len(Board.start().snapshot(game_id="", seed=0, source="").position)
    return {
        "command": "model imitate",
        "model": {"folder": str(work.final), "parameters": shape.parameters, "longest_sequence": shape.positions},
        "teacher": (
            {"recorded_files": len(settings.recorded)}
            if settings.recorded
            else {
                "players": " ".join(settings.teachers),
                "games": settings.games,
                "games_to_play": to_play,
            }
            | ({"search_cpu_s_about": round(to_play * _search_s(settings))} if settings.searches else {})
        ),
        "work": {"steps": settings.steps, "positions_a_step": settings.positions, "resumed": str(is_begun(work))},
        "disk": {
            "games_bytes_about": 0 if settings.recorded else settings.games * _POSITIONS_A_GAME * 2 * position_bytes,
            "checkpoint_bytes_about": 2 * 3 * shape.parameters * shape.width,  # two of weights and both moments
            "weights_bytes": shape.parameters * shape.width,
            "free_bytes": free_bytes(runs_root),
        },
        "threads": {"cores": usable_cores()},
    }


def _search_s(settings: ImitationSettings) -> float:
    """CPU seconds that the searches of a game take, about."""
    share = sum(name.endswith(SEARCHES) for name in settings.teachers) / len(settings.teachers)
    return share * _DECISIONS_A_YEAR * (settings.last_year - 1900) * DECISION_S
