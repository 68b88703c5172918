"""One decision or one advantage group, read from a run's rows for display; works while the run trains.

Every figure is stored or follows from stored ones; no model is called."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.thinking import Thought, thought_of
from entente.game.board import Board
from entente.game.render import draw_board, frame_around, order_locations
from entente.game.snapshot import Snapshot, make_snapshot
from entente.reports.order_odds import odds_of_orders
from entente.telemetry.errors import InputError
from storage.arrow_files import COMPONENTS
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import open_phases, open_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    token: str
    legal: int | None
    """Size of the legal set; 1: forced; None: a token of the thought, except the end mark of the completion."""
    logprob: float
    """Log-probability of the sampled token under the masked policy, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    facts: dict[str, Any]
    prompt: str
    thought: Thought | None
    answer: str
    orders: list[tuple[str, float | None]]
    """Each order with its probability given the thought and the earlier orders; None if the completion cannot be split."""
    sampled: list[ShownToken]
    results: dict[str, list[str]]
    """Results by unit; empty means success."""
    steps: list[int]
    """Steps that trained on it."""
    board: Board | None
    """None if the fork's phases were not recorded."""

    @property
    def components(self) -> dict[str, float]:
        return {name: float(self.facts[name]) for name in COMPONENTS}

    def picture(self, *, whole: bool = False) -> str:
        """The board as SVG; a thicker arrow is a more probable order. Cropped to the orders unless `whole`."""
        if self.board is None:
            raise InputError(f"the position of decision {self.facts['decision_id']} was not recorded, so no board can be drawn")
        power, orders = self.facts["power"], [order for order, _ in self.orders]
        certainty = {order: probability for order, probability in self.orders if probability is not None}
        if whole:
            return draw_board(self.board, {power: orders}, certainty=certainty)
        return draw_board(
            self.board, {power: orders}, certainty=certainty, frame=frame_around(order_locations(self.board, power, orders))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    facts: dict[str, Any]
    members: list[dict[str, Any]]
    """fork, decision_id, return, policy_version, status; best first, failed last."""
    best: Decided
    worst: Decided
    """Over decisions that did not fail."""


class Inspector:
    """A run's rows, opened for reading; use it as a context manager."""

    def __init__(self, paths: RunPaths, model: Path, storage: StorageSettings) -> None:
        self._paths, self._codec = paths, Codec(model)
        self._connection = connect(paths.root, storage)

    def __enter__(self) -> "Inspector":
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()

    def decision(self, decision_id: int) -> Decided:
        rows = _rows(self._connection, "SELECT * FROM decisions WHERE decision_id = ?", decision_id)
        if not rows:
            raise InputError(
                f"run '{self._paths.root.name}' has no decision {decision_id}: get ids with entente sql, "
                'as in "select decision_id, phase, power from decisions limit 5"'
            )
        facts = rows[0]
        path = self._paths.shards / facts["shard"]
        decisions = open_shard(path)
        row = decisions.slice(facts["row"], 1).to_pylist()[0]
        prompt, completion = row["input_ids"][: row["prompt_len"]], row["input_ids"][row["prompt_len"] :]
        logprobs = row["behaviour_logprobs"]
        thought = thought_of(completion, logprobs, row["legal_ids"], row["legal_offsets"], self._codec)
        n_thought = thought.tokens if thought else 0
        legal = [None] * n_thought + np.diff(row["legal_offsets"]).tolist()[n_thought:]
        odds = odds_of_orders(row, (self._codec.separator_id, self._codec.eos_id))
        phase_row = _played_phase(open_phases(path, decisions).to_pylist(), facts)
        steps = "SELECT DISTINCT step FROM batches WHERE decision_id = ? ORDER BY step"
        return Decided(
            facts=facts,
            prompt=self._codec.decode(prompt),
            thought=thought,
            answer=self._codec.decode(completion[n_thought:]),
            orders=[(order, one and one.probability) for order, one in zip(row["orders"], odds, strict=True)],
            sampled=[
                ShownToken(token=self._codec.decode([token]), legal=size, logprob=float(logprob))
                for token, size, logprob in zip(completion, legal, logprobs, strict=True)
            ],
            results=_results(phase_row, facts["power"]),
            steps=[step["step"] for step in _rows(self._connection, steps, decision_id)],
            board=None if phase_row is None else Board.restore(_snapshot(phase_row, facts)),
        )

    def group(self, start_group: int, power: str | None, phase: str | None) -> Forked:
        """The start group's advantage group with the largest return_range of returns, within `power` and `phase` if set."""
        asked = {"start_group": start_group, "power": power and power.upper(), "phase": phase and phase.upper()}
        asked = {name: value for name, value in asked.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in asked)
        widest = f"SELECT * FROM groups WHERE {where} ORDER BY usable DESC, return_range DESC, phase, power LIMIT 1"
        rows = _rows(self._connection, widest, *asked.values())
        if not rows:
            words = ", ".join(f"{name} {value}" for name, value in asked.items())
            raise InputError(
                f"run '{self._paths.root.name}' has no group with {words}: list them with entente sql \"from groups\""
            )
        facts = rows[0]
        members = _rows(
            self._connection,
            """
            SELECT fork, decision_id, "return", policy_version, status FROM decisions
            WHERE shard = ? AND start_group = ? AND power = ? AND phase = ?
            ORDER BY status = 'complete' DESC, "return" DESC, fork
            """,
            *(facts[name] for name in ("shard", "start_group", "power", "phase")),
        )
        complete = [member for member in members if member["status"] == "complete"] or members
        best, worst = (self.decision(complete[place]["decision_id"]) for place in (0, -1))
        return Forked(facts=facts, members=members, best=best, worst=worst)


def _rows(connection: duckdb.DuckDBPyConnection, question: str, *values: object) -> list[dict[str, Any]]:
    return connection.sql(question, params=list(values)).to_arrow_table().to_pylist()


def _played_phase(phases: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any] | None:
    at = [facts[name] for name in ("start_group", "fork", "phase_index")]
    return next(
        (phase_row for phase_row in phases if [phase_row["start_group"], phase_row["fork"], phase_row["phase_index"]] == at), None
    )


def _results(phase_row: dict[str, Any] | None, power: str) -> dict[str, list[str]]:
    if phase_row is None:
        return {}
    mine = {" ".join(order.split()[:2]) for order in json.loads(phase_row["orders"]).get(power, [])}
    return {unit: results for unit, results in json.loads(phase_row["results"]).items() if unit in mine}


def _snapshot(phase_row: dict[str, Any], facts: dict[str, Any]) -> Snapshot:
    source = f"policy:{facts['policy_version']}"
    return make_snapshot(phase_row["position"], phase_row["phase"], source=source, game_id=facts["game_id"], seed=facts["seed"])
