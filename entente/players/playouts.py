"""Playouts: continue a game after one order set of one power, with scripted players, and value the end.

A playout is synchronous and equals `entente.rollouts.fork.play_fork` with the same seeds. It is faster because it records
nothing, checks no orders, and stops once the value cannot change any more. The caller checks that the order set is legal.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from entente.game.board import POWERS, Board
from entente.game.scores import horizon_reached
from entente.game.scripted import Player, looks_back, player
from entente.players.search_settings import SearchSettings
from entente.players.seeds import seeded_rng

UNIT_SHARE = 0.25
"""Weight of units in the value of a position, beside centres: what a unit brings shows only after the playout. 0.2, 0.33 and 0.5
gained equally much."""


class Playouts:
    """The playouts of one decision, by order set and scenario, which seeds all seats by phase and power. Its playouts share the
    others' first orders, and the play after a position that several order sets reach."""

    def __init__(self, board: Board, power: str, seed_name: str, settings: SearchSettings) -> None:
        """`board` is not changed; `seed_name` seeds the decision."""
        self._board, self._power, self._seed_name, self._settings = board, power, seed_name, settings
        self._scenarios: dict[int, _Scenario] = {}

    def value(self, orders: Sequence[str], number: int) -> float:
        """Value for the power after these orders and scripted play to the horizon, in scenario `number`."""
        if number not in self._scenarios:
            self._scenarios[number] = self._scenario(f"{self._seed_name}/playout/{number}")
        scenario, start, years = self._scenarios[number], self._board.phase, self._settings.years
        game = self._board.fork()
        game.advance({**scenario.first, self._power: orders})
        position = _position(game, scenario.looks_back)
        value = scenario.values.get(position)
        if value is None:
            _play_on(game, start, scenario.seats, scenario.name, years)
            value = scenario.values[position] = value_of(game, self._power)
        game.release()
        return value

    def _scenario(self, name: str) -> "_Scenario":
        names = seats_of(name, self._settings.player)
        seats = {power: player(who) for power, who in names.items()}
        first = _scripted(self._board, seats, name, skip=(self._power,))
        return _Scenario(name=name, seats=seats, first=first, looks_back=any(map(looks_back, names.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    name: str
    seats: dict[str, Player]
    first: dict[str, Sequence[str]]
    """Orders of the others in the first phase."""
    looks_back: bool
    values: dict[object, float] = field(default_factory=dict)
    """By the position after the first phase."""


def _position(game: Board, looks_back: bool) -> object:
    """A key, equal for boards that continue equally; the centres of a game that is over, which has no text."""
    if game.is_over:
        return game.centre_counts()
    return game.snapshot(game_id="", seed=0, source="").position if looks_back else game.rules_position()


def _play_on(game: Board, start: str, seats: Mapping[str, Player], name: str, years: int) -> None:
    while not horizon_reached(start, game.phase, years):
        game.advance(_scripted(game, seats, name))


def seats_of(name: str, players: Sequence[str]) -> dict[str, str]:
    lot = seeded_rng(name, "seats")
    return {power: lot.choice(players) for power in POWERS}


def value_of(board: Board, power: str) -> float:
    """Value of a position for `power`, 0 to 34: a mean of its centres and of the units that it can have in spring."""
    centres = board.centre_counts()[POWERS.index(power)]
    return centres if board.is_over else (1 - UNIT_SHARE) * centres + UNIT_SHARE * board.units_in_spring(power)


def _scripted(board: Board, seats: Mapping[str, Player], name: str, skip: Container[str] = ()) -> dict[str, Sequence[str]]:
    phase, legal = board.phase, board.legal_orders()
    return {power: seats[power](legal[power], seeded_rng(name, phase, power), board) for power in legal if power not in skip}
