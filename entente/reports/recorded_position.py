"""A position of a recorded game by the name of its phase: of a run's game, or of a played game's file."""

from collections.abc import Mapping
from pathlib import Path

from entente.evaluation.what_if import OrderSets, RecordedPosition
from entente.game.board import Board
from entente.reports.replayed import read_game as read_run_game
from entente.telemetry.errors import InputError
from storage.played_games import play_again, read_game
from storage.runs import RunPaths


def position_of_run(paths: RunPaths, game: str, phase: str) -> RecordedPosition:
    """The position of a game of the run, which is named as `entente replay` names it."""
    found = read_run_game(paths, game, None)
    phases = {
        ply.phase: (ply.board, {who: tuple(each.order for each in own) for who, own in ply.orders.items()}) for ply in found.plies
    }
    return _choose(f"game {found.game.name} of run {paths.root.name}", phases, phase)


def position_of_played_game(file: Path, phase: str) -> RecordedPosition:
    """The position of a game that `entente play` stored."""
    game = read_game(file)
    phases = {each.turn.phase: (Board.restore(each.before), each.turn.orders) for each in play_again(game, file)}
    return _choose(f"game {game.name}", phases, phase)


def _choose(game: str, phases: Mapping[str, tuple[Board, OrderSets]], wanted: str) -> RecordedPosition:
    ordered = [phase for phase, (_, orders) in phases.items() if orders]
    wanted = wanted.upper() or next((phase for phase in ordered if phase.endswith("M")), "")
    if wanted not in ordered:
        why = f"ended in {wanted}, so nothing was ordered there" if wanted in phases else f"has no phase '{wanted}'"
        has = f"its phases with orders are {', '.join(ordered)}" if ordered else "no phase of it was played"
        raise InputError(f"{game} {why}: {has}")
    board, orders = phases[wanted]
    return RecordedPosition(game=game, board=board, orders=orders)
