"""Tables of a step for W&B: a sampled game with boards, and the trainer's log.

Only one game of one shard and the ends of a few files are read.
"""

import json
from pathlib import Path
from typing import Any

from game.board import Board
from game.render import draw_board, frame_around, order_locations
from game.snapshot import make_snapshot
from storage.ledger import read_ledger
from storage.runs import RunPaths
from storage.shards import open_plies
from telemetry.wandb_run import Picture, Table

TRAINER_LINES = 50
"""Number of newest lines of the trainer's log."""
_TAIL_BYTES = 1 << 20
_GAME = (
    "step", "policy version", "start group", "fork", "phase", "power", "orders", "others' orders", "results", "return", "board",
)  # fmt: skip
_ONE_GAME = ("shard", "start_group", "fork")


def step_tables(paths: RunPaths, step: int) -> list[Table]:
    """The tables of a trained step."""
    tables = [Table(name="sampled_game", columns=_GAME, rows=_sampled_game(paths, step))]
    if logged := [[line] for line in _tail(paths.trainer_log, TRAINER_LINES) if line.strip()]:
        tables.append(Table(name="logs", columns=("text",), rows=logged))
    return tables


def _sampled_game(paths: RunPaths, step: int) -> list[list[Any]]:
    """The decisions of the first row's fork that the step trained on, in game order. The ledger's order is random."""
    rows = read_ledger(paths, step)
    if rows is None or not rows.num_rows:
        return []
    first, *others = rows.to_pylist()
    same = [first, *(row for row in others if all(row[name] == first[name] for name in _ONE_GAME))]
    plies = open_plies(paths.shards / f"{first['shard']}").to_pylist()
    by_ply = {ply["ply"]: ply for ply in plies if (ply["start_group"], ply["fork"]) == (first["start_group"], first["fork"])}
    return [_decision(step, row, by_ply[row["ply"]]) for row in sorted(same, key=_order) if row["ply"] in by_ply]


def _order(row: dict[str, Any]) -> tuple[int, str]:
    return row["ply"], row["power"]


def _decision(step: int, row: dict[str, Any], ply: dict[str, Any]) -> list[Any]:
    power, all_orders, results = row["power"], json.loads(ply["orders"]), json.loads(ply["results"])
    orders = all_orders.get(power, [])
    others = "; ".join(f"{other}: {', '.join(given)}" for other, given in all_orders.items() if other != power and given)
    mine = {" ".join(order.split()[:2]) for order in orders}
    own_results = "; ".join(f"{unit}: {', '.join(map(str, found))}" for unit, found in results.items() if unit in mine and found)
    who = f"policy:{row['policy_version']}"
    board = Board.restore(make_snapshot(ply["position"], ply["phase"], source=who, game_id=ply["snapshot_id"], seed=0))
    drawn = draw_board(board, {power: orders}, frame=frame_around(order_locations(board, power, orders)))
    return [
        step, row["policy_version"], row["start_group"], row["fork"], ply["phase"], power, "; ".join(orders), others, own_results,
        row["return"], Picture(drawn),
    ]  # fmt: skip


def _tail(file: Path, count: int) -> list[str]:
    """The newest lines of a file; empty if there is no file."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return lines.read().decode(errors="replace").splitlines()[-count:]
