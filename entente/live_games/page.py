"""The page of a game in the browser: the map, and the game as JSON, which `play.js` renders."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from entente.game.board import Board
from entente.game.snapshot import POWERS
from entente.live_games.game import HUMAN, PlayedGame, Turn
from entente.reports.replay_page import map_context, places, position_data, script_json, short
from entente.reports.write_page import page_template
from storage.played_games import SavedProposal


def page_html(game: PlayedGame, players: Sequence[str], key: str, nonce: str, file: str = "") -> str:
    """The self-contained page. `nonce` is for its script and style (Content-Security-Policy); see `play_app` for the others."""
    template = page_template("page.html.jinja", Path(__file__).parent)
    page = places() | {
        "key": key,
        "policy": list(range(len(POWERS))),
        "people": [number for number, power in enumerate(POWERS) if game.seats[power] == HUMAN],
        "seats": [game.seats[power] for power in POWERS],
        "players": list(players),
        "name": game.name,
        "file": file,
    }
    return template.render(
        name=game.name,
        nonce=nonce,
        **map_context(),
        page=script_json(page),
        state=script_json(as_data(game)),
    )


def as_data(game: PlayedGame) -> dict[str, Any]:
    """The game as JSON for the page; powers are indices into POWERS."""
    waits = game.waits_for
    legal = game.board.legal_orders()
    return {
        "revision": game.revision,
        "deciding": game.is_deciding,
        "over": game.is_over,
        "watched": not game.people,
        "waits": [POWERS.index(power) for power in waits],
        "given": [POWERS.index(power) for power in game.pending],
        "phases": [*map(_played, game.turns), _position(game.board, {}, {}, {}, {})],
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
    return _position(turn.board, turn.orders, turn.results, turn.probabilities, turn.proposals)


def _position(
    board: Board,
    orders: Mapping[str, Sequence[str]],
    results: Mapping[str, Sequence[str]],
    probabilities: Mapping[str, float],
    proposals: Mapping[str, Sequence[SavedProposal]],
) -> dict[str, Any]:
    ordered = {
        POWERS.index(power): [[order, list(results.get(" ".join(order.split(" ", 2)[:2]), ()))] for order in own]
        for power, own in orders.items()
    }
    sure = {POWERS.index(power): short(value) for power, value in probabilities.items()}
    tried = {
        POWERS.index(power): [
            {
                "orders": list(each.orders),
                "value": short(each.value),
                "playouts": each.playouts,
                "sure": None if each.probability is None else short(each.probability),
            }
            for each in sorted(candidates, key=lambda each: -each.value)
        ]
        for power, candidates in proposals.items()
    }
    return position_data(board) | {"orders": ordered, "sure": sure, "tried": tried}
