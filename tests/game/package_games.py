"""Games of the untouched package, and the form in which it saves them."""

import json
from typing import Any

from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format


def package_game(units: dict[str, list[str]], orders: dict[str, list[str]]) -> Game:
    """The game with these units alone, after one phase."""
    game = Game()
    game.clear_units()
    for power, own in units.items():
        game.set_units(power, own)
    for power, own in orders.items():
        game.set_orders(power, own)
    game.process()
    return game


def saved_form(game: Game) -> dict[str, Any]:
    return json.loads(json.dumps(to_saved_game_format(game)))
