"""One game of a run by phase: positions, all orders with results, and the probabilities of the policy's orders.

Works while the run trains. All figures are stored or follow from stored ones; no model is called."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.decoding.thinking import thought_of
from entente.evaluation.what_if import OrderSets, RecordedPosition
from entente.game.board import Board
from entente.game.snapshot import POWERS, make_snapshot
from entente.reports.games import GameName, find_game
from entente.reports.inspect_rows import Inspector, phases_of
from entente.reports.order_odds import OrderOdds, odds_of_orders
from entente.telemetry.errors import InputError
from storage import played_games
from storage.arrow_files import COMPONENTS
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard

_COLUMNS = ("decision_id", "policy_version", "thought", "logprob", "return", "status", "reason")
"""Of a decision; `logprob` covers the orders given the thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOrder:
    order: str
    results: tuple[str, ...]
    probability: float | None
    """Of the policy's order given the earlier ones; None if no policy sampled it, or without a tokenizer."""
    choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPhase:
    number: int
    phase: str
    board: Board
    orders: dict[str, tuple[ShownOrder, ...]]
    """By power; empty at the end."""
    decisions: dict[str, dict[str, Any]]
    """By power that decided: _COLUMNS, components other than 0, and (step, policy lag) of each step that used it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedGame:
    run: str
    game: GameName
    phases: tuple[ShownPhase, ...]
    opponents: str
    game_id: str
    ended: str
    """Why: horizon, won, ..."""
    has_odds: bool
    """False without the tokenizer."""


def read_game(rows: Inspector, asked: str) -> ReplayedGame:
    return replay_game(rows, find_game(rows.paths, asked))


def replay_game(rows: Inspector, game: GameName) -> ReplayedGame:
    phases, decisions = rows.played(game)
    for row in decisions:
        completion, logprobs = row["input_ids"][row["prompt_len"] :], row["behaviour_logprobs"]
        thought = thought_of(completion, logprobs, row["legal_ids"], row["legal_offsets"], rows.codec)
        row |= {
            "odds": odds_of_orders(row, rows.codec),
            "thought": thought,
            "logprob": sum(logprobs[thought.tokens if thought else 0 :]),
        }
    by_place = {(row["phase_index"], row["power"]): row for row in decisions}
    return ReplayedGame(
        run=rows.paths.root.name,
        game=game,
        phases=tuple(_played_phase(row, by_place) for row in phases),
        opponents=decisions[0]["opponents"],
        game_id=decisions[0]["game_id"],
        ended=decisions[0]["ended"],
        has_odds=rows.codec is not None,
    )


def _played_phase(row: dict[str, Any], facts: Mapping[tuple[int, str], dict[str, Any]]) -> ShownPhase:
    number, ordered, results = row["phase_index"], json.loads(row["orders"] or "{}"), json.loads(row["results"] or "{}")
    asked = {power: facts[number, power] for power in POWERS if (number, power) in facts}
    return ShownPhase(
        number=number,
        phase=row["phase"],
        board=_board(row),
        orders={power: _orders(ordered[power], results, asked.get(power)) for power in POWERS if ordered.get(power)},
        decisions={power: _decision(row) for power, row in asked.items()},
    )


def _board(row: Mapping[str, Any]) -> Board:
    return Board.restore(make_snapshot(row["position"], row["phase"], source="", game_id="", seed=0))


def _orders(ordered: list[str], results: Mapping[str, list[str]], decision: Mapping[str, Any] | None) -> tuple[ShownOrder, ...]:
    sampled: dict[str, list[OrderOdds | None]] = {}  # a power may waive several builds
    for order, odd in zip(decision["orders"], decision["odds"], strict=True) if decision else ():
        sampled.setdefault(order, []).append(odd)
    odds = [sampled[order].pop(0) if sampled.get(order) else None for order in ordered]
    return tuple(
        ShownOrder(
            order=order,
            results=tuple(dict.fromkeys(results.get(" ".join(order.split()[:2]), ()))),
            probability=None if odd is None else odd.probability,
            choices=0 if odd is None else odd.choices,
        )
        for order, odd in zip(ordered, odds, strict=True)
    )


def _decision(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _COLUMNS} | {
        "components": {name: row[name] for name in COMPONENTS if row[name]},
        "used": row["used"],
    }


def position_of_run(paths: RunPaths, game: GameName, phase: str) -> RecordedPosition:
    path, phases = paths.shards / game.shard, dict[str, tuple[Board, OrderSets]]()
    for row in phases_of(open_phases(path, open_shard(path)), game):
        orders = json.loads(row["orders"] or "{}")
        phases[row["phase"]] = _board(row), {power: tuple(orders[power]) for power in POWERS if orders.get(power)}
    return _choose(f"game {game.name} of run {paths.root.name}", phases, phase)


def position_of_played_game(file: Path, phase: str) -> RecordedPosition:
    game = played_games.read_game(file)
    phases = {each.turn.phase: (Board.restore(each.before), each.turn.orders) for each in played_games.play_again(game, file)}
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
