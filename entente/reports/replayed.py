"""One game of a run by phase: positions, all orders with results, and the probabilities of the policy's orders.

Works while the run trains. All figures are stored or follow from stored ones; no model is called."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from entente.decoding.codec import Codec
from entente.decoding.thinking import thought_of
from entente.evaluation.what_if import OrderSets, RecordedPosition
from entente.game.board import Board
from entente.game.snapshot import POWERS, make_snapshot
from entente.reports.games import GameName, find_game
from entente.reports.order_odds import OrderOdds, odds_of_orders
from entente.telemetry.errors import InputError
from storage import played_games
from storage.arrow_files import COMPONENTS
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import open_phases, open_shard

_COLUMNS = ("decision_id", "policy_version", "thought", "logprob", "return", "status", "reason")
"""Of the view `decisions`; `logprob` covers the orders given the thought."""


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


def read_game(paths: RunPaths, asked: str, model: Path | None, storage: StorageSettings | None = None) -> ReplayedGame:
    with connect(paths.root, storage) as connection:
        game = find_game(connection, paths.root.name, asked)
        facts = _decisions(connection, game)
    return replay_game(paths, game, facts, model)


def replay_game(paths: RunPaths, game: GameName, rows: Sequence[dict[str, Any]], model: Path | None) -> ReplayedGame:
    """`rows`: of the view `decisions`, with the list `used` of (step, policy lag)."""
    facts = {(row["phase_index"], row["power"]): row for row in rows}
    decisions, phases = _rows_of(paths, game)
    codec = None if model is None else Codec(model)
    ends = frozenset() if codec is None else frozenset((codec.separator_id, codec.eos_id))
    for row in decisions:
        completion, logprobs = row["input_ids"][row["prompt_len"] :], row["behaviour_logprobs"]
        thought = thought_of(completion, logprobs, row["legal_ids"], row["legal_offsets"], codec)
        facts[row["phase_index"], row["power"]] |= {
            "orders_drawn": row["orders"],
            "odds": odds_of_orders(row, ends),
            "thought": thought,
            "logprob": sum(logprobs[thought.tokens if thought else 0 :]),
        }
    return ReplayedGame(
        run=paths.root.name,
        game=game,
        phases=tuple(_played_phase(row, facts) for row in phases),
        opponents=decisions[0]["opponents"],
        game_id=decisions[0]["game_id"],
        ended=decisions[0]["ended"],
        has_odds=bool(ends),
    )


def _decisions(connection: duckdb.DuckDBPyConnection, game: GameName) -> list[dict[str, Any]]:
    question = """
        SELECT d.*, (
            SELECT list((b.step, b.policy_lag) ORDER BY b.step) FROM batches AS b WHERE b.decision_id = d.decision_id
        ) AS used
        FROM decisions AS d WHERE d.shard = ? AND d.start_group = ? AND d.fork = ?
    """
    rows = connection.sql(question, params=[game.shard, game.start_group, game.fork]).to_arrow_table().to_pylist()
    return [row | {"used": [tuple(pair.values()) for pair in row["used"] or ()]} for row in rows]


def _rows_of(paths: RunPaths, game: GameName) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    path = paths.shards / game.shard
    decisions = open_shard(path)
    phases = open_phases(path, decisions)
    rows = _of_game(phases, game)
    if not rows:
        raise InputError(f"no position of game {game.name} was recorded, so there is nothing to show: it failed at its start")
    return _of_game(decisions, game), sorted(rows, key=lambda row: row["phase_index"])


def _of_game(table: pa.Table, game: GameName) -> list[dict[str, Any]]:
    chosen = table.filter((pc.field("start_group") == game.start_group) & (pc.field("fork") == game.fork))
    return list(chosen.to_pylist())


def _played_phase(row: dict[str, Any], facts: Mapping[tuple[int, str], dict[str, Any]]) -> ShownPhase:
    number, ordered, results = row["phase_index"], json.loads(row["orders"] or "{}"), json.loads(row["results"] or "{}")
    snapshot = make_snapshot(row["position"], row["phase"], source="replay", game_id="", seed=0)
    asked = {power: facts[number, power] for power in POWERS if (number, power) in facts}
    return ShownPhase(
        number=number,
        phase=row["phase"],
        board=Board.restore(snapshot),
        orders={power: _orders(ordered[power], results, asked.get(power)) for power in POWERS if ordered.get(power)},
        decisions={power: _decision(row) for power, row in asked.items()},
    )


def _orders(ordered: list[str], results: Mapping[str, list[str]], decision: Mapping[str, Any] | None) -> tuple[ShownOrder, ...]:
    sampled: dict[str, list[OrderOdds | None]] = {}  # a power may waive several builds
    for order, odd in zip(decision["orders_drawn"], decision["odds"], strict=True) if decision else ():
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


def position_of_run(paths: RunPaths, game: str, phase: str) -> RecordedPosition:
    replayed = read_game(paths, game, None)
    phases = {
        phase_row.phase: (phase_row.board, {who: tuple(each.order for each in own) for who, own in phase_row.orders.items()})
        for phase_row in replayed.phases
    }
    return _choose(f"game {replayed.game.name} of run {paths.root.name}", phases, phase)


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
