"""Recorded games in the JSON of the `diplomacy` package: played again on the board, and written.

A game is accepted only if this program plays it exactly as it was recorded: the standard map, rules that do not change how orders
are judged, legal orders, and after each phase the recorded units and centres. Missing orders become what the rules make of them:
a hold, a disband of a dislodged unit, or a waived build. This module reads no files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format

from entente.game.adjudicator import MAP
from entente.game.board import OVER, POWERS, Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.telemetry.errors import InputError

RULES = frozenset(
    {
        "ALWAYS_WAIT",
        "CD_DUMMIES",
        "IGNORE_ERRORS",
        "MULTIPLE_POWERS_PER_PLAYER",
        "NO_DEADLINE",
        "NO_DIAS",
        "NO_OBSERVATIONS",
        "NO_PRESS",
        "POWER_CHOICE",
        "PROPOSE_DIAS",
        "PUBLIC_PRESS",
        "REAL_TIME",
        "SOLITAIRE",
        "START_MASTER",
    }
)
"""Rules of the package about who plays, when, and with what press. All other rules change the game itself."""


def replay_recorded(saved: Any, where: str) -> Iterator[tuple[Board, dict[str, tuple[str, ...]]]]:
    """Play a recorded game again.

    Args:
        saved: the JSON object that `diplomacy.utils.export.to_saved_game_format` makes.
        where: names the game in messages.

    Yields:
        The board before each phase, and the canonical orders of each power. A power whose disbands the rules chose is missing.
        The board is stepped when the next item is asked for.

    Raises:
        InputError: it is no such game, or this program would not play it as it was recorded.
    """
    phases = _checked_phases(saved, where)
    board = Board.start()
    for number, phase in enumerate(phases):
        _check_board(board, phase, where)
        is_last = number + 1 == len(phases)
        if board.is_over or (not any(phase["orders"].values()) and (is_last or _is_drawn(phase, phases[number + 1]))):
            return
        given, known = _orders(board, phase["orders"], f"{where}, {phase['name']}")
        yield board, known
        board.step(given)


def recorded_orders(saved: Any, where: str) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
    """The name of each phase that was played, and the whole order set of each power that had something to order.

    The units that are gone show which disbands the rules chose.
    """
    found: list[tuple[str, dict[str, tuple[str, ...]]]] = []
    before: tuple[dict[str, LegalOrders], dict[str, tuple[str, ...]]] = {}, {}
    board = Board.start()
    for board, known in replay_recorded(saved, where):
        if found:
            _add_disbands(found[-1][1], *before, board)
        found.append((board.phase, known))
        before = board.legal_orders(), board.units()
    if found:
        _add_disbands(found[-1][1], *before, board)  # the last phase is played by now
    return found


def as_recorded(name: str, turns: Sequence[tuple[str, Mapping[str, Sequence[str]]]]) -> str:
    """The JSON object that the package saves for a game from spring 1901, by the package's own game.

    Args:
        turns: each phase's name and its legal order sets.

    Raises:
        InputError: the package plays the orders in another way than they are told.
    """
    game = Game(game_id=name, map_name=MAP)
    for phase, orders in turns:
        if game.get_current_phase() != phase:
            raise InputError(
                f"the diplomacy package plays game '{name}' otherwise: it is in {game.get_current_phase()}, not {phase}"
            )
        for power, own in orders.items():
            game.set_orders(power, list(own))
        game.process()
    return json.dumps(to_saved_game_format(game))


def _add_disbands(
    known: dict[str, tuple[str, ...]], legal: Mapping[str, LegalOrders], units: Mapping[str, Sequence[str]], after: Board
) -> None:
    for power in legal.keys() - known.keys():
        gone = {f"{unit} D" for unit in set(units[power]) - set(after.units()[power])}
        known[power] = tuple(options[0] for options in legal[power].options if options[0] in gone)


def _is_drawn(phase: Any, following: Any) -> bool:
    """True for a phase in which the players or the game's master ended the game: nothing was played in it."""
    return following["name"] == OVER and not phase.get("results")


def _checked_phases(saved: Any, where: str) -> list[Any]:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("phases"), list) or not _is_whole(saved["phases"]):
        raise InputError(f"{where} is no game as the diplomacy package saves it: it lacks phases with name, state and orders")
    check_variant(saved, where)
    return saved["phases"]


def check_variant(named: Mapping[str, Any], what: str) -> None:
    """Check the map and the rules of a game or a state.

    Raises:
        InputError: this program does not play them.
    """
    if named.get("map", MAP) != MAP:
        raise InputError(f"{what} is on the map {named['map']!r}, and only {MAP!r} is played here: leave it out")
    rules = named.get("rules") or []
    unknown = sorted(set(map(str, rules if isinstance(rules, list) else [rules])) - RULES)
    if unknown:
        raise InputError(f"{what} has the rule {unknown[0]}, which is not played here: leave it out")


def _is_whole(phases: Sequence[Any]) -> bool:
    def is_one(phase: Any) -> bool:
        return (
            isinstance(phase, Mapping)
            and isinstance(phase.get("name"), str)
            and all(isinstance(phase.get(part), Mapping) for part in ("orders", "state"))
            and all(isinstance(phase["state"].get(part), Mapping) for part in ("units", "centers"))
            and all(
                listed is None or is_texts(listed)
                for by_power in (phase["orders"], phase["state"]["units"], phase["state"]["centers"])
                for listed in by_power.values()
            )
        )

    return all(map(is_one, phases))


def is_texts(listed: Any) -> bool:
    """True for a list of texts."""
    return isinstance(listed, list) and all(isinstance(each, str) for each in listed)


def _check_board(board: Board, phase: Any, where: str) -> None:
    """Raise InputError unless the board is the recorded one. Units that were dislodged bear an asterisk in the record."""
    if phase["name"] == OVER:  # also of a game that its players ended
        return
    units, centres = ({power: set(named.get(power) or ()) for power in POWERS} for named in _state(phase))
    dislodged = board.dislodged()
    found = {power: {*own, *(f"*{unit}" for unit in dislodged[power])} for power, own in board.units().items()}
    same = found == units and {power: set(own) for power, own in board.centres().items()} == centres
    if phase["name"] != board.phase or not same:
        raise InputError(
            f"{where} was judged by other rules: in {phase['name']} it has another board than this program, which is in "
            f"{board.phase}: leave it out"
        )


def _state(phase: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return phase["state"]["units"], phase["state"]["centers"]


def _orders(board: Board, recorded: Mapping[str, Any], where: str) -> tuple[dict[str, list[str]], dict[str, tuple[str, ...]]]:
    """The orders to play, and those of powers whose whole order set is known."""
    given: dict[str, list[str]] = {}
    known: dict[str, tuple[str, ...]] = {}
    legal = board.legal_orders()
    for power in POWERS:
        listed = recorded.get(power) or []
        if not isinstance(listed, list) or (listed and power not in legal and listed != [WAIVE] * len(listed)):
            raise InputError(f"{where} has orders of {power}, which has nothing to order: leave the game out")
        if power not in legal:
            continue
        given[power] = [_as_listed(str(order), legal[power], where) for order in listed]
        if legal[power].kind in (OrderKind.BUILD, OrderKind.DISBAND):
            given[power] = given[power][: legal[power].picks]  # the package records more, and plays the first ones
        whole = legal[power].completed(given[power])
        if whole is not None:
            if not legal[power].admits(whole):
                raise InputError(f"{where} has orders of {power} that are not legal together: {', '.join(given[power])}")
            given[power], known[power] = list(whole), whole
    return given, known


def _as_listed(order: str, legal: LegalOrders, where: str) -> str:
    """The order as `LegalOrders` spells it: the support of a move names no coast."""
    for spelling in (order, order.rpartition("/")[0]):
        if any(spelling in options for options in legal.options) or (spelling == WAIVE and legal.kind is OrderKind.BUILD):
            return spelling
    raise InputError(f"{where} has the order '{order}' of {legal.power}, which is not legal there: leave the game out")
