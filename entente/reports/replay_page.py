"""Writes a replayed game as one HTML file without network access; `board.js` draws a few KB of JSON per position on one map."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template

from entente.game.board import Board
from entente.game.render import COLOURS, draw_empty_map, mix_colours
from entente.game.sketch_map import COASTS, HEIGHT, LAND, SEA, WIDTH, place
from entente.game.snapshot import POWERS
from entente.reports.replayed import ReplayedGame, ShownOrder, ShownPhase
from entente.reports.write_page import of_run, page_template
from entente.telemetry.progress import shown

_DIGITS = 6


def replay_html(
    game: ReplayedGame, runs_root: Path, template: Template | None = None, links: Mapping[str, str] | None = None, **live: Any
) -> str:
    """`template`, `links`, `live`: of a live page, and what it has besides; None: a file."""
    found = as_data(game, runs_root) | ({"links": links} if links else {})
    return (template or page_template("replay.html.jinja")).render(
        run=game.run,
        game=game.game.name,
        about=_about(game),
        phases=len(game.phases),
        **map_context(),
        data=script_json(found),
        **live,
    )


def as_data(game: ReplayedGame, runs_root: Path) -> dict[str, Any]:
    """Powers are indices into POWERS, here and in `position_data`."""
    run = of_run(game.run, runs_root)
    return places() | {
        "policy": [POWERS.index(power) for power in game.game.powers],
        "opponents": game.opponents,
        "ask": f"entente runs inspect decision ID {run}",
        "what_if": f"{shlex.quote(game.game.full_name)} {run}",
        "odds": game.has_odds,
        "phases": [_played_phase(phase_row) for phase_row in game.phases],
    }


def _about(game: ReplayedGame) -> str:
    lacking = f" Chosen among the games that can be read: {game.game.lacking}." if game.game.lacking else ""
    powers = [power.title() for power in game.game.powers]
    who = ", ".join(powers[:-1]) + " and " + powers[-1] if len(powers) > 1 else powers[0]
    against = "" if len(powers) == len(POWERS) else f" against {game.opponents} players"
    versions = {decision["policy_version"] for phase_row in game.phases for decision in phase_row.decisions.values()}
    if not versions:
        return f"The policy played {who}{against}.{lacking}"
    one = "the base" if versions == {0} else f"version {max(versions)}"
    drew = f"versions {min(versions)} to {max(versions)}" if len(versions) > 1 else one
    failed = "" if game.game.status == "complete" else " The game failed before its end."
    return f"The policy ({drew}) played {who}{against}, from a position of game {game.game_id}.{failed}{lacking}"


def script_json(value: Any) -> str:
    """JSON for a script element, which no text in it can end."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def places() -> dict[str, Any]:
    """What `board.js` knows of the map, and the powers' names."""
    return {
        "powers": [power.title() for power in POWERS],
        "lands": list(LAND),
        "places": {name: place(name) for name in (*LAND, *SEA, *COASTS)},
    }


def map_context() -> dict[str, Any]:
    ground, names = draw_empty_map()
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "ground": ground,
        "names": names,
        "colours": list(COLOURS.values()),
        "light": [mix_colours(colour, "#ffffff", 0.38) for colour in COLOURS.values()],
        "dark": [mix_colours(colour, "#22262b", 0.42) for colour in COLOURS.values()],
    }


def position_data(board: Board) -> dict[str, Any]:
    owner = {province: str(number) for number, power in enumerate(POWERS) for province in board.influence()[power]}
    owner |= {centre: str(number) for number, power in enumerate(POWERS) for centre in board.centres()[power]}
    return {
        "short": board.phase,
        "long": board.long_phase.title(),
        "units": [[number, unit] for number, power in enumerate(POWERS) for unit in board.units()[power]],
        "out": [[number, unit] for number, power in enumerate(POWERS) for unit in board.dislodged()[power]],
        "ground": "".join(owner.get(province, ".") for province in LAND),
        "centres": {centre: number for number, power in enumerate(POWERS) for centre in board.centres()[power]},
        "free": list(board.free_centres()),
    }


def _played_phase(phase_row: ShownPhase) -> dict[str, Any]:
    return position_data(phase_row.board) | {
        "short": phase_row.phase,
        "orders": {POWERS.index(power): [_order(order) for order in orders] for power, orders in phase_row.orders.items()},
        "decisions": {POWERS.index(power): _decision(decision) for power, decision in phase_row.decisions.items()},
    }


def _order(order: ShownOrder) -> list[Any]:
    odds = [] if order.probability is None else [short(order.probability), order.choices]
    return [order.order, list(order.results), *odds]


def short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _decision(decision: dict[str, Any]) -> dict[str, Any]:
    thought = decision["thought"]
    return decision | {
        "decision_id": str(decision["decision_id"]),  # a JavaScript number would lose digits
        "thought": thought and {"about": thought.sentence, "text": shown(thought.text or "", keep="\n")},
        "components": {name: round(value, _DIGITS) for name, value in decision["components"].items()},
        **{name: round(decision[name], _DIGITS) for name in ("logprob", "return")},
    }
