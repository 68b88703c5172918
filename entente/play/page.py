"""The page of a game in the browser: the map once, and the game as JSON, which `play.js` draws."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from entente.game.board import Board
from entente.game.sketch_map import COASTS, LAND, SEA, place
from entente.game.snapshot import POWERS
from entente.play.game import HUMAN, PlayedGame, Turn
from entente.reports.replay_page import map_context, position_data
from entente.reports.write_page import page_template
from storage.played_games import SavedProposal

_DIGITS = 6


def page_html(game: PlayedGame, players: Sequence[str], key: str, nonce: str, file: str = "") -> str:
    """The whole page; it loads nothing else.

    Args:
        players: names that may give hints.
        key: sent with each request of the page.
        nonce: of the page's own script and style.
        file: where the game is stored, as a shell reads it; empty: nowhere.
    """
    template = page_template("page.html.jinja", Path(__file__).parent)
    page = {
        "key": key,
        "powers": [power.title() for power in POWERS],
        "policy": list(range(len(POWERS))),
        "people": [number for number, power in enumerate(POWERS) if game.seats[power] == HUMAN],
        "seats": [game.seats[power] for power in POWERS],
        "players": list(players),
        "name": game.name,
        "file": file,
        "lands": list(LAND),
        "places": {name: place(name) for name in (*LAND, *SEA, *COASTS)},
    }
    return template.render(
        name=game.name,
        nonce=nonce,
        **map_context(),
        # So that no text ends the script that holds it.
        page=_json(page).replace("<", "\\u003c"),
        state=_json(as_data(game)).replace("<", "\\u003c"),
    )


def as_data(game: PlayedGame) -> dict[str, Any]:
    """The game as the page shows it; powers are numbers, in their usual order."""
    waits = game.waits_for
    legal = game.board.legal_orders()
    return {
        "revision": game.revision,
        "deciding": game.is_deciding,
        "over": game.is_over,
        "waits": [POWERS.index(power) for power in waits],
        "given": [POWERS.index(power) for power in game.given],
        "plies": [*map(_played, game.turns), _position(game.board, {}, {}, {}, {})],
        "legal": {
            POWERS.index(power): {
                "kind": legal[power].kind.value,
                "sites": list(legal[power].sites),
                "options": [list(options) for options in legal[power].options],
                "picks": legal[power].picks,
            }
            for power in waits
        },
    }


@lru_cache(maxsize=1024)
def _played(turn: Turn) -> dict[str, Any]:
    """A turn's data, kept because turns do not change."""
    return _position(turn.board, turn.orders, turn.results, turn.probabilities, turn.proposals)


def _position(
    board: Board,
    orders: Mapping[str, Sequence[str]],
    results: Mapping[str, Sequence[str]],
    probabilities: Mapping[str, float],
    proposals: Mapping[str, Sequence[SavedProposal]],
) -> dict[str, Any]:
    given = {
        POWERS.index(power): [[order, list(results.get(" ".join(order.split(" ", 2)[:2]), ()))] for order in own]
        for power, own in orders.items()
    }
    sure = {POWERS.index(power): _short(value) for power, value in probabilities.items()}
    tried = {
        POWERS.index(power): [
            {
                "orders": list(each.orders),
                "value": _short(each.value),
                "playouts": each.playouts,
                "sure": None if each.probability is None else _short(each.probability),
            }
            for each in sorted(found, key=lambda each: -each.value)
        ]
        for power, found in proposals.items()
    }
    return position_data(board) | {"orders": given, "sure": sure, "tried": tried}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
