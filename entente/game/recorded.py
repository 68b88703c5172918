"""Recorded games in the JSON of the `diplomacy` package: reader and writer.

The reader takes every position from the record, because other programs adjudicate convoys differently. The orders of a phase must
be legal in its position. The package's own parser reads them, so a convoyed army needs no "VIA" and a unit no type. A missing
order becomes what the rules make of it: a hold, a disband of a dislodged unit, or a waived build. This module reads no files.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format

from entente.game.board import OVER, POWERS, Board
from entente.game.geography import geography
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.positions import board_of_state, check_variant, contested_in
from entente.game.rules import MAP
from entente.telemetry.errors import InputError

_OrderSets = dict[str, tuple[str, ...]]


class RefusedGameError(InputError):
    """A recorded game that cannot be read. Callers count refused games by `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    phase: str
    orders: _OrderSets
    """The whole order set of each power that had orders to give."""
    position: str
    """Text of the position, if our rules lead from the turn before to another one; else empty."""


def replay_recorded(
    saved: Any, where: str, ignore: Callable[[str], None] | None = None
) -> Iterator[tuple[Board, dict[str, tuple[str, ...]]]]:
    """The phases of a recorded game that were played: boards, and canonical orders by power. A power that ordered nothing, or
    whose disbands the rules chose, is missing: it decided nothing.

    Args:
        saved: the JSON object that `diplomacy.utils.export.to_saved_game_format` makes.
        where: name of the game in messages.
        ignore: called with a sentence for each illegal order, which the reader skips; None: it refuses such a game.

    Raises:
        RefusedGameError: it is no such game, or contradicts itself or the rules.
    """
    last_orders: _OrderSets = {}
    for phase, recorded, _ in _phases(saved, where):
        board = recorded.with_last_orders(last_orders)
        orders = _orders(board, phase["orders"], f"{where}, {phase['name']}", ignore)
        ordered = {power.upper() for power, listed in phase["orders"].items() if listed}
        yield board, {power: own for power, own in orders.items() if power in ordered}
        last_orders = orders if board.phase_type == "M" else last_orders


def recorded_turns(saved: Any, where: str, ignore: Callable[[str], None]) -> list[RecordedTurn]:
    """The phases of a recorded game with whole order sets, to replay from their positions; see `replay_recorded`. The units that
    are gone show which disbands the rules chose."""
    turns: list[RecordedTurn] = []
    ours = Board.start()
    for phase, board, after in _phases(saved, where):
        position = ""
        if _position(ours) != _position(board):
            ours = board.with_last_orders(ours.last_orders)
            position = ours.snapshot(game_id="", seed=0, source="").position
        orders = _orders(board, phase["orders"], f"{where}, {phase['name']}", ignore)
        orders |= _chosen_disbands(board, orders, after)
        turns.append(RecordedTurn(phase=board.phase, orders=orders, position=position))
        ours.step(orders)
    return turns


def board_of_game(game: Any) -> Board:
    """The last position of a saved game, with its last orders; raises an InputError if it cannot be played on from there."""
    phases = game.get("phases") if isinstance(game, Mapping) else None
    if not isinstance(phases, list) or not phases or not isinstance(phases[-1], Mapping):
        raise InputError("the game is not in the diplomacy package's format: it lacks phases")
    check_variant(game, "the game")
    state, name, before = phases[-1].get("state"), str(phases[-1].get("name")), phases[-2] if phases[1:] else None
    state = _with_retreats(state, before) if name.endswith("R") else state
    board = board_of_state(state, phases[-1].get("name"), contested_in(before))
    return board.with_last_orders(last_recorded_orders(phases[:-1]))


def last_recorded_orders(phases: Sequence[Any]) -> _OrderSets:
    """The order sets of the last movement phase among these, empty if there is none. An illegal order becomes a hold."""
    last = next((phase for phase in reversed(phases) if _is_whole([phase]) and phase["name"].endswith("M")), None)
    try:
        return {} if last is None else _orders(board_of_state(last["state"], last["name"]), last["orders"], "", lambda _: None)
    except InputError:  # the phase contradicts itself, which is no reason to refuse the position after it
        return {}


def as_recorded(name: str, turns: Sequence[tuple[Board, Mapping[str, Sequence[str]]]], now: Board) -> str:
    """The package's JSON of a game, from spring 1901 over `turns` (board, legal order sets) to `now`. Where the package
    adjudicates differently, the record continues from our position."""
    game = Game(game_id=name, map_name=MAP)
    for board, orders in turns:
        _bring_to(game, board)
        for power, own in orders.items():
            game.set_orders(power, list(own))
        game.process()
    _bring_to(game, now)
    return json.dumps(to_saved_game_format(game))


def _bring_to(game: Game, board: Board) -> None:
    dislodged = {power: {unit: list(places) for unit, places in own.items()} for power, own in board.dislodged().items()}
    units = {power: [*own, *(f"*{unit}" for unit in dislodged[power])] for power, own in board.units().items()}
    ours = {
        "name": board.phase,
        "units": units,
        "retreats": dislodged,
        "centers": {power: list(own) for power, own in board.centres().items()},
        "influence": {power: list(own) for power, own in board.influence().items()},
    }
    if _comparable(game.get_state()) != _comparable(ours):
        game.set_state(ours, clear_history=False)


def _comparable(state: Mapping[str, Any]) -> list[Any]:
    parts = (state["units"], state["centers"], *(state["retreats"][power] for power in POWERS))
    return [state["name"], *({name: sorted(listed) for name, listed in part.items()} for part in parts)]


def _chosen_disbands(board: Board, orders: _OrderSets, after: Mapping[str, Any]) -> _OrderSets:
    """The disbands that the rules chose: read off the next recorded units, else by our rules."""
    disbands: _OrderSets = {}
    legal = board.legal_orders()
    if missing := legal.keys() - orders.keys():
        ours = board.fork()
        ours.step(orders)
        for power in missing:
            for left in (after.get(power) or (), ours.units()[power]):
                gone = [f"{unit} D" for unit in board.units()[power] if unit not in left]
                if power not in disbands and (whole := legal[power].completed(gone)) is not None:
                    disbands[power] = whole
    return disbands


def _position(board: Board) -> tuple[Any, ...]:
    return board.phase, board.units(), board.dislodged(), board.centres()


def _phases(saved: Any, where: str) -> Iterator[tuple[Mapping[str, Any], Board, Mapping[str, Any]]]:
    phases = _checked_phases(saved, where)
    for number, phase in enumerate(phases):
        before, following = (phases[number - 1] if number else None), (phases[number + 1] if phases[number + 1 :] else None)
        if phase["name"] == OVER or _is_unplayed(phase, following):
            return
        ordered = {order.split()[-1][:3].upper() for own in phase["orders"].values() for order in own or () if order.strip()}
        try:
            state = _with_retreats(phase["state"], before, ordered) if phase["name"].endswith("R") else phase["state"]
            board = board_of_state(state, phase["name"], contested_in(before) - ordered)
        except InputError as error:
            reason = "its position contradicts itself"
            raise RefusedGameError(reason, f"{where}, {phase['name']}: {error}: leave the game out") from error
        yield phase, board, following["state"]["units"] if following else {}


def _with_retreats(state: Any, before: Any, ordered: Collection[str] = ()) -> Any:
    """The state with the retreats by our rules, and to provinces in `ordered`, if it lists none, as other programs' states."""
    is_lacking = isinstance(state, Mapping) and not state.get("retreats") and isinstance(state.get("units"), Mapping)
    if not is_lacking or not _is_whole([before]) or not before["name"].endswith("M"):
        return state
    try:
        after = board_of_state(before["state"], before["name"]).fork()
    except InputError:
        return state
    after.step(_orders(after, before["orders"], "", lambda _: None))
    out = json.dumps(state["units"]).upper()  # of a request it may hold anything
    possible = {
        power: {
            unit: [*places, *(place for place in geography().reach[unit[0], unit[2:]] if place[:3] in ordered)]
            for unit, places in own.items()
            if f'"*{unit}"' in out
        }
        for power, own in after.dislodged().items()
    }
    return {**state, "retreats": possible}


def _is_unplayed(phase: Any, following: Any) -> bool:
    """True for the phase in which a game was saved, or in which the players or the game master ended it. The package saves empty
    results and the orders so far, which may still change."""
    if following is None:
        return not any(phase["orders"].values()) or phase.get("results") == {}
    return not any(phase["orders"].values()) and following["name"] == OVER and not phase.get("results")


def _checked_phases(saved: Any, where: str) -> list[Any]:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("phases"), list) or not _is_whole(saved["phases"]):
        reason = "it is not in the diplomacy package's format"
        raise RefusedGameError(
            reason, f"{where} is not in the diplomacy package's format: it lacks phases with name, state and orders"
        )
    try:
        check_variant(saved, where)
    except InputError as error:
        raise RefusedGameError("it has another map or other rules", str(error)) from error
    if any(later <= earlier for earlier, later in pairwise(_when(phase["name"]) for phase in saved["phases"])):
        raise RefusedGameError("its phases are in no order", f"the phases of {where} do not follow each other: leave it out")
    return saved["phases"]


def _when(phase: str) -> tuple[str, int, int]:
    return phase[1:5], "SFW".find(phase[:1]), "MRA".find(phase[-1:])


def _is_whole(phases: Sequence[Any]) -> bool:
    def is_one(phase: Any) -> bool:
        return (
            isinstance(phase, Mapping)
            and isinstance(phase.get("name"), str)
            and all(isinstance(phase.get(part), Mapping) for part in ("orders", "state"))
            and all(isinstance(phase["state"].get(part), Mapping) for part in ("units", "centers"))
            and all(
                listed is None or (isinstance(listed, list) and all(isinstance(each, str) for each in listed))
                for by_power in (phase["orders"], phase["state"]["units"], phase["state"]["centers"])
                for listed in by_power.values()
            )
        )

    return bool(phases) and all(map(is_one, phases))


def _orders(board: Board, recorded: Mapping[str, Any], where: str, ignore: Callable[[str], None] | None) -> _OrderSets:
    order_sets: _OrderSets = {}
    legal = board.legal_orders()
    by_power = {power.upper(): listed or () for power, listed in recorded.items()}
    for power in POWERS:
        own = []
        for order in by_power.get(power, ()):
            if not order.strip() or order == WAIVE or order.startswith("VOID "):
                continue
            if power in legal and (spelled := _as_listed(order, board, legal[power])):
                own.append(spelled)
                continue
            sentence = f"{where} has the order '{order[:60]}' of {power}, which is not legal there"
            if ignore is None:
                raise RefusedGameError("an order is not legal", f"{sentence}: leave the game out")
            ignore(f"{sentence} and is left out")
        if power in legal:
            if legal[power].kind in (OrderKind.BUILD, OrderKind.DISBAND):
                own = own[: legal[power].picks]  # the package records more, and plays the first ones
            if (whole := legal[power].completed(own)) is not None:
                order_sets[power] = whole
    return order_sets


def _as_listed(order: str, board: Board, legal: LegalOrders) -> str | None:
    return _spelled(order, legal) or _spelled(board.parsed(legal.power, order), legal)


def _spelled(order: str, legal: LegalOrders) -> str | None:
    without_coast = order.rpartition("/")[0]
    spellings = (order, without_coast, f"{order} VIA", f"{without_coast} VIA")
    return next((each for each in spellings if any(each in options for options in legal.options)), None)
