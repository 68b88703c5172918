"""The page of a game in the browser: the map, and the game as JSON, which `play.js` renders."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from entente.game.snapshot import POWERS
from entente.live_games.game import HUMAN, PlayedGame, Turn
from entente.reports.replay_page import map_context, places, position_data, script_json, short
from entente.reports.write_page import page_template


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
    now = Turn(board=game.board, orders={}, results={}, probabilities={}, proposals={})
    return {
        "revision": game.revision,
        "deciding": game.is_deciding,
        "over": game.is_over,
        "watched": not game.people,
        "waits": [POWERS.index(power) for power in waits],
        "given": [POWERS.index(power) for power in game.pending],
        "phases": [*map(_played, game.turns), _phase(now)],
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


def _phase(turn: Turn) -> dict[str, Any]:
    ordered = {
        POWERS.index(power): [[order, list(turn.results.get(" ".join(order.split(" ", 2)[:2]), ()))] for order in own]
        for power, own in turn.orders.items()
    }
    sure = {POWERS.index(power): short(value) for power, value in turn.probabilities.items()}
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
        for power, candidates in turn.proposals.items()
    }
    return position_data(turn.board) | {"orders": ordered, "sure": sure, "tried": tried}


_played = lru_cache(maxsize=1024)(_phase)
