"""One decision or one advantage group, read from its shard for display; works while the run trains.

Every figure is stored or follows from stored ones; no model is called. Only the shard and the ledgers that can name its rows are
read, so the size of the run hardly matters."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from entente.decoding.codec import Codec
from entente.decoding.thinking import Thought, thought_of
from entente.game.board import Board
from entente.game.render import draw_board, frame_around, order_locations
from entente.game.snapshot import Snapshot, make_snapshot
from entente.reports.games import GameName
from entente.reports.order_odds import odds_of_orders
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.training.advantages import advantages_of, leave_one_out
from storage.arrow_files import COMPONENTS
from storage.ledger import read_ledger, recorded_steps
from storage.rewards import decision_facts
from storage.runs import RunPaths
from storage.shards import SHARD_NAME, open_phases, open_shard, shard_names

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    token: str
    legal: int | None
    """Size of the legal set; 1: forced; None: a token of the thought, except the end mark of the completion."""
    logprob: float
    """Log-probability of the sampled token under the masked policy, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    facts: Facts
    prompt: str
    thought: Thought | None
    answer: str
    orders: list[tuple[str, float | None]]
    """Each order with its probability given the thought and the earlier orders; None if the completion cannot be split."""
    sampled: list[ShownToken]
    results: dict[str, list[str]]
    """Results by unit; empty means success."""
    used: list[tuple[int, int]]
    """(step, policy lag) of the steps that trained on it."""
    advantage: float | None
    """In the first of these steps, else within its group; None if the group cannot be trained on."""
    board: Board | None
    """None if the fork's phases were not recorded."""

    @property
    def components(self) -> dict[str, float]:
        return {name: float(self.facts[name]) for name in COMPONENTS}

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.used]

    def result(self, order: str) -> str:
        return ", ".join(self.results.get(" ".join(order.split()[:2]), []))

    def picture(self, *, whole: bool = False) -> str:
        """The board as SVG; a thicker arrow is a more probable order. Cropped to the orders unless `whole`."""
        if self.board is None:
            raise InputError(f"the position of decision {self.facts['decision_id']} was not recorded, so no board can be drawn")
        power, orders = self.facts["power"], [order for order, _ in self.orders]
        certainty = {order: probability for order, probability in self.orders if probability is not None}
        cropped = {} if whole else {"frame": frame_around(order_locations(self.board, power, orders))}
        return draw_board(self.board, {power: orders}, certainty=certainty, **cropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    facts: Facts
    """shard, producer, start_group, power, phase, n, return_range, usable, used (number of steps)."""
    members: list[Facts]
    """fork, decision_id, return, advantage, policy_version, status, ... of its rows; best first, failed last."""
    best: Decided
    worst: Decided
    """Over decisions that did not fail."""


@dataclass(kw_only=True)
class _Shard:
    name: str
    decisions: pa.Table
    facts: pa.Table
    phases: pa.Table
    steps: Sequence[int] = ()
    """Recorded steps that `uses` were read from."""
    uses: Mapping[int, list[tuple[int, int]]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Facts]:
        return self.facts.to_pylist()

    @cached_property
    def _places(self) -> dict[tuple[int, int, int], int]:
        keys = (self.phases[name].to_pylist() for name in ("start_group", "fork", "phase_index"))
        return {key: place for place, key in enumerate(zip(*keys, strict=True))}

    def phase(self, facts: Facts, later: int = 0) -> Facts | None:
        place = self._places.get((facts["start_group"], facts["fork"], facts["phase_index"] + later))
        return None if place is None else self.phases.slice(place, 1).to_pylist()[0]

    def group_of(self, facts: Facts) -> list[Facts]:
        keys = ("start_group", "power", "phase")
        return [row for row in self.rows if all(row[key] == facts[key] for key in keys)]


class Inspector:
    """A run's rows, for one thread at a time. `model`: for the text of tokens; None: their ids are shown."""

    def __init__(self, paths: RunPaths, model: Path | None, settings: RunSettings, *, most_lag: int | None = None) -> None:
        """`most_lag`: the largest policy lag of any step; None: unknown, so all later ledgers are searched for a decision."""
        self.paths, self._settings, self._most_lag = paths, settings, most_lag
        self.codec = None if model is None else Codec(model)
        self._last: _Shard | None = None

    def decision(self, decision_id: int, shard: str = "") -> Decided:
        """`shard`: its file, if known; else all are searched."""
        for name in [shard] if shard else self._shards_with(decision_id):
            opened = self._open(name)
            for facts in opened.rows:
                if facts["decision_id"] == decision_id:
                    return self._decided(opened, facts)
        raise InputError(
            f"run '{self.paths.root.name}' has no decision {decision_id}: get ids with entente sql, "
            'as in "select decision_id, phase, power from decisions limit 5"'
        )

    def group(self, start_group: int, power: str | None = None, phase: str | None = None, shard: str = "") -> Forked:
        """The start group's advantage group with the largest range of returns, within `power` and `phase` if set."""
        asked = {"start_group": start_group, "power": power and power.upper(), "phase": phase and phase.upper()}
        asked = {name: value for name, value in asked.items() if value is not None}
        found = []
        for name in [shard] if shard else self._shards_of(start_group):
            opened = self._open(name)
            keys = dict.fromkeys(
                (row["power"], row["phase"]) for row in opened.rows if all(row[key] == value for key, value in asked.items())
            )
            groups = [opened.group_of({"start_group": start_group, "power": each, "phase": when}) for each, when in keys]
            found += [(_group_facts(rows), rows, opened) for rows in groups]
        if not found:
            words = ", ".join(f"{name} {value}" for name, value in asked.items())
            raise InputError(
                f"run '{self.paths.root.name}' has no group with {words}: list them with entente sql \"from groups\""
            )
        facts, rows, opened = min(found, key=lambda each: (not each[0]["usable"], -each[0]["return_range"], each[0]["phase"]))
        members = [row | {"advantage": self._advantage(opened, row)} for row in rows]
        members.sort(key=lambda row: (row["status"] != "complete", -row["return"], row["fork"]))
        complete = [row for row in members if row["status"] == "complete"] or members
        best, worst = (self._decided(opened, complete[place]) for place in (0, -1))
        used = {step for row in rows for step, _ in opened.uses.get(row["decision_id"], ())}
        return Forked(facts=facts | {"used": len(used)}, members=members, best=best, worst=worst)

    def siblings(self, facts: Facts) -> list[Decided]:
        """All decisions of the group of a decision, by fork."""
        opened = self._open(facts["shard"])
        return [self._decided(opened, row) for row in sorted(opened.group_of(facts), key=lambda row: row["fork"])]

    def parting(self, one: Facts, other: Facts) -> tuple[str, list[str], list[str]] | None:
        """The first phase in which the power ordered otherwise in two forks of a group, and the orders that each gave alone."""
        opened, given = self._open(one["shard"]), list[dict[str, list[str]]]()
        for fork in (one["fork"], other["fork"]):
            rows = [
                row
                for row in opened.rows
                if [row["start_group"], row["fork"], row["power"]] == [one["start_group"], fork, one["power"]]
            ]
            rows.sort(key=lambda row: row["phase_index"])
            given.append({row["phase"]: opened.decisions["orders"][row["row"]].as_py() for row in rows})
        for phase, own in given[0].items():
            if set(own) != set(theirs := given[1].get(phase, [])):
                return phase, [order for order in own if order not in theirs], [order for order in theirs if order not in own]
        return None

    def course(self, facts: Facts) -> list[tuple[str, tuple[str, ...]]]:
        """(phase, supply centres) of the power from the decision to the end of its fork."""
        opened, boards = self._open(facts["shard"]), []
        while (row := opened.phase(facts, len(boards))) is not None:
            boards.append((row["phase"], Board.restore(_snapshot(row, facts)).centres()[facts["power"]]))
        return boards

    def games(self, shard: str) -> list[GameName]:
        """The games of a shard, a game for each fork, in order."""
        opened, played = self._open(shard), dict[tuple[int, int], list[str]]()
        phases = zip(*(opened.phases[name].to_pylist() for name in ("start_group", "fork", "phase_index", "phase")), strict=True)
        for group, fork, _, phase in sorted(phases):
            played.setdefault((group, fork), []).append(phase)
        found = []
        for key in sorted({(row["start_group"], row["fork"]) for row in opened.rows}):
            rows = [row for row in opened.rows if (row["start_group"], row["fork"]) == key]
            boards = played.get(key, [])
            found.append(
                GameName(
                    producer=shard.partition("/")[0],
                    start_group=key[0],
                    fork=key[1],
                    shard=shard,
                    phases=len(boards),
                    first=boards[0] if boards else "",
                    last=boards[-1] if boards else "",
                    powers=tuple(sorted({row["power"] for row in rows})),
                    version=max(row["policy_version"] for row in rows),
                    status=min(row["status"] for row in rows),
                    gain=sum(row["centres_gained"] for row in rows),
                )
            )
        return found

    def played(self, game: GameName) -> tuple[list[Facts], list[Facts]]:
        """The phases of a game, in order; and its decisions: all columns, the facts, and the (step, policy lag) of each use."""
        opened, key = self._open(game.shard), (game.start_group, game.fork)
        facts = [row for row in opened.rows if (row["start_group"], row["fork"]) == key]
        columns = opened.decisions.take([row["row"] for row in facts]).to_pylist()
        decisions = [
            whole | row | {"used": opened.uses.get(row["decision_id"], [])} for whole, row in zip(columns, facts, strict=True)
        ]
        return phases_of(opened.phases, game), decisions

    def _open(self, name: str) -> _Shard:
        if self._last is None or self._last.name != name:
            path = self.paths.shards / name
            if name.count("/") != 1 or ".." in name or not SHARD_NAME.fullmatch(path.name):
                raise InputError(f"'{name[:100]}' names no shard of run '{self.paths.root.name}'")
            decisions, how = open_shard(path), self._settings.storage
            facts = decision_facts(decisions, name, how.reward_weights, how.discount)
            self._last = _Shard(name=name, decisions=decisions, facts=facts, phases=open_phases(path, decisions))
        if (steps := recorded_steps(self.paths)) != self._last.steps:
            self._last.uses, self._last.steps = self._uses(self._last.facts, steps), steps
        return self._last

    def _uses(self, facts: pa.Table, steps: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Steps and lags by decision; a step trains on older versions than its own."""
        uses: dict[int, list[tuple[int, int]]] = {}
        versions, own = facts["policy_version"].to_numpy(), set(facts["decision_id"].to_pylist())
        if not len(versions):
            return uses
        last = int(versions.max()) + 1 + self._most_lag if self._most_lag is not None else None
        for step in steps:
            if versions.min() < step and (last is None or step <= last) and (rows := read_ledger(self.paths, step)) is not None:
                for decision, lag in zip(rows["decision_id"].to_pylist(), rows["policy_lag"].to_pylist(), strict=True):
                    if decision in own:
                        uses.setdefault(decision, []).append((step, lag))
        return uses

    def _shards_with(self, decision_id: int) -> Iterator[str]:
        """Newest first; reads one column without checks, which opening the shard makes."""
        for name in reversed(shard_names(self.paths)):
            if not (path := self.paths.shards / name).is_file():  # opening a pipe would wait for a writer
                continue
            try:
                with pa.memory_map(str(path)) as file:
                    if (pa.ipc.open_file(file).read_all()["decision_id"].to_numpy() == decision_id).any():
                        yield name
            except (pa.ArrowException, OSError, KeyError):
                continue  # a damaged shard has no decision that could be shown

    def _shards_of(self, start_group: int) -> list[str]:
        """Of each producer, the last shard that begins at or before the start group."""
        last = {name.split("/")[0]: name for name in shard_names(self.paths) if int(Path(name).stem) <= start_group}
        return list(last.values())

    def _advantage(self, opened: _Shard, facts: Facts) -> float | None:
        used = opened.uses.get(facts["decision_id"])
        if used and (rows := read_ledger(self.paths, used[0][0])) is not None:
            groups = np.asarray(rows["advantage_group"])
            if not (groups < 0).any():
                advantages = advantages_of(np.asarray(rows["return"]), groups, self._settings.training)
                return float(advantages[rows["decision_id"].to_pylist().index(facts["decision_id"])])
        group = opened.group_of(facts)
        if not _group_facts(group)["usable"]:
            return None
        values = leave_one_out(np.array([row["return"] for row in group]), np.zeros(len(group), int))
        return float(values[[row["decision_id"] for row in group].index(facts["decision_id"])])

    def _decided(self, opened: _Shard, facts: Facts) -> Decided:
        row, codec = opened.decisions.slice(facts["row"], 1).to_pylist()[0], self.codec
        prompt, completion = row["input_ids"][: row["prompt_len"]], row["input_ids"][row["prompt_len"] :]
        logprobs = row["behaviour_logprobs"]
        thought = thought_of(completion, logprobs, row["legal_ids"], row["legal_offsets"], codec)
        n_thought = thought.tokens if thought else 0
        legal = [None] * n_thought + np.diff(row["legal_offsets"]).tolist()[n_thought:]
        odds, played = odds_of_orders(row, codec), opened.phase(facts)
        return Decided(
            facts=facts,
            prompt=self._text(prompt),
            thought=thought,
            answer=self._text(completion[n_thought:]),
            orders=[(order, one and one.probability) for order, one in zip(row["orders"], odds, strict=True)],
            sampled=[
                ShownToken(token=self._text([token]), legal=size, logprob=float(logprob))
                for token, size, logprob in zip(completion, legal, logprobs, strict=True)
            ],
            results=_results(played, facts["power"]),
            used=opened.uses.get(facts["decision_id"], []),
            advantage=self._advantage(opened, facts),
            board=None if played is None else Board.restore(_snapshot(played, facts)),
        )

    def _text(self, ids: list[int]) -> str:
        return "".join(f"⟨{token}⟩" for token in ids) if self.codec is None else self.codec.decode(ids)


def phases_of(phases: pa.Table, game: GameName) -> list[Facts]:
    """The phases of a game among those of its shard, in order. Raises InputError if there are none."""
    own = phases.filter((pc.field("start_group") == game.start_group) & (pc.field("fork") == game.fork)).to_pylist()
    if not own:
        raise InputError(f"no position of game {game.name} was recorded, so there is nothing to show: it failed at its start")
    return sorted(own, key=lambda row: row["phase_index"])


def _group_facts(rows: list[Facts]) -> Facts:
    """As the view `groups`."""
    returns = [row["return"] for row in rows]
    whole = all(row["status"] == "complete" and not row["orders_rejected"] and np.isfinite(row["return"]) for row in rows)
    kept = {name: rows[0][name] for name in ("shard", "producer", "start_group", "power", "phase", "snapshot_id")}
    return kept | {"n": len(rows), "return_range": max(returns) - min(returns), "usable": whole and len(rows) >= 2}


def _results(played: Facts | None, power: str) -> dict[str, list[str]]:
    if played is None:
        return {}
    mine = {" ".join(order.split()[:2]) for order in json.loads(played["orders"]).get(power, [])}
    return {unit: results for unit, results in json.loads(played["results"]).items() if unit in mine}


def _snapshot(played: Facts, facts: Facts) -> Snapshot:
    source = f"policy:{facts['policy_version']}"
    return make_snapshot(played["position"], played["phase"], source=source, game_id=facts["game_id"], seed=facts["seed"])
