"""Requests of the decode benchmark: made-up decisions of a given size, and decisions of real rollouts.

Made-up decisions use the words of real orders. No two of them share a table or a prompt.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decoding.legal_table import END
from game.board import Board
from game.legal import LegalOrders, OrderKind
from game.players import player
from game.prompt_settings import PromptSettings
from game.snapshot import Snapshot
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE
from rollouts.fork import Tokens

_PLACES = """
ADR AEG ALB ANK APU ARM BAL BAR BEL BER BLA BOH BOT BRE BUD BUL BUR CLY CON DEN EAS EDI ENG FIN GAL GAS GRE HEL HOL ION IRI KIE
LON LVN LVP LYO MAO MAR MOS MUN NAF NAO NAP NTH NWG NWY PAR PIC PIE POR PRU ROM RUH RUM SER SEV SIL SKA SMY SPA STP SWE SYR TRI
TUN TUS TYR TYS UKR VEN VIE WAL WAR WES YOR
"""
PLACES = _PLACES.split()
PROMPT_TOKENS = 230
"""Length of a made-up prompt, about that of a real one. None of it is cached, so prefill takes more than in a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of made-up decisions."""

    units: int
    fewest: int
    """Least number of orders of a unit."""
    most: int
    """Largest number of orders of a unit."""
    batch: int
    """Decisions in flight at a time."""


SHAPES = {
    "b32": Shape(units=4, fewest=10, most=60, batch=32),
    "b128": Shape(units=4, fewest=10, most=60, batch=128),
    "10units_b32": Shape(units=10, fewest=30, most=400, batch=32),
}


def made_up_orders(dice: random.Random, shape: Shape) -> LegalOrders:
    """Random legal orders: holds, moves and supports."""
    sites, options = [], []
    for place in dice.sample(PLACES, shape.units):
        near, size = dice.sample(PLACES, 12), dice.randint(shape.fewest, shape.most)
        own = {f"A {place} H", *(f"A {place} - {goal}" for goal in near[:6])}
        while len(own) < size:
            own.add(f"A {place} S {dice.choice('AF')} {dice.choice(PLACES)} - {dice.choice(near)}")
        sites.append(f"A {place}")
        options.append(tuple(sorted(own)))
    return LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=tuple(sites), options=tuple(options), picks=shape.units)


def made_up_prompt(dice: random.Random, tokens: Tokens) -> list[int]:
    """A random prompt, which shares no prefix with another."""
    return [dice.randrange(tokens.codec.vocabulary_size) for _ in range(PROMPT_TOKENS)]


def made_up_requests(dice: random.Random, tokens: Tokens, shape: Shape) -> list[GenerationRequest]:
    """A batch of made-up decisions."""
    return [
        GenerationRequest(
            request_id=f"made-up/{dice.getrandbits(60):x}",
            prompt_ids=made_up_prompt(dice, tokens),
            table=tokens.tables.table(made_up_orders(dice, shape)),
            seed=dice.getrandbits(40),
        )
        for _ in range(shape.batch)
    ]


def played_positions(games: int, seed: int) -> list[Snapshot]:
    """One movement phase of each game of `mover`, from 1902 on."""
    found = []
    for game in range(games):
        dice, board, first = random.Random(f"decode {seed} {game}"), Board.start(), 1902 + game % 4
        while not board.is_over and (board.phase_type != "M" or board.year < first):
            board.step({power: player("mover")(legal, dice, board) for power, legal in board.legal_orders().items()})
        found.append(board.snapshot(game_id=f"decode-{game}", seed=game, source="benchmark"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One decision with its own copy of the board."""

    board: Board
    legal: LegalOrders
    snapshot_id: str


def rollout_cases(positions: Sequence[Snapshot], *, forks: int, phases: int) -> list[Case]:
    """The open decisions of all powers in forks of `positions`, in the order of a rollout.

    Random players play the forks, so they diverge as they would with an untrained policy.
    """
    live = [(snapshot, fork, Board.restore(snapshot)) for snapshot in positions for fork in range(forks)]
    cases = []
    for phase in range(phases):
        for snapshot, fork, board in live:
            if board.is_over:
                continue
            legal, kept = board.legal_orders(), board.fork()
            cases += [
                Case(board=kept, legal=own, snapshot_id=snapshot.snapshot_id) for own in legal.values() if not own.is_forced
            ]
            dice = random.Random(f"fork {snapshot.snapshot_id} {fork} {phase}")
            board.step({power: player("random")(own, dice, board) for power, own in legal.items()})
    return cases


def requests_for(cases: Sequence[Case], tokens: Tokens, label: str) -> list[GenerationRequest]:
    """The cases as requests, with the prompts and the notation of `tokens`."""
    return [
        GenerationRequest(
            request_id=f"{label}/{number}",
            prompt_ids=tokens.prompt_ids(case.board, case.legal),
            table=tokens.tables.table(case.legal),
            seed=number,
            snapshot_id=case.snapshot_id,
        )
        for number, case in enumerate(cases)
    ]


@dataclass(slots=True)
class RecordingEngine:
    """Passes requests to an engine and keeps them with their generations."""

    engine: Any
    asked: list[GenerationRequest] = field(default_factory=list)
    """In the order in which they arrived."""
    drawn: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)
    """In the order in which they were drawn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        generation = await self.engine.generate(request)
        self.drawn.append((request, generation))
        return generation


class InstantEngine:
    """An engine that takes no time: it draws every legal token with the same probability."""

    name = "instant"

    async def generate(self, request: GenerationRequest) -> Generation:
        dice, table, node, ids = random.Random(request.seed), request.table, 0, []
        offsets, token_ids, next_nodes = table.offsets, table.token_ids, table.next_nodes
        while node != END:
            edge = dice.randrange(offsets[node], offsets[node + 1])
            ids.append(token_ids[edge])
            node = next_nodes[edge]
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            policy=BASE,
            worker=self.name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Folders of the measured models."""

    full: Path
    """A model that writes full notation."""
    slot: Path
    """A model of the same shape that writes slot notation. Only a tiny model needs a second one."""


def models_to_measure(given: Path | None, root: Path) -> Models:
    """`given`, or the default tiny model and its twin for slot notation; missing tiny models are made under `root`.

    A tiny tokenizer needs many tokens for words that it did not learn, so each notation has a tiny model of its own.
    """
    from decoding.model_files import resolve_model
    from training.settings import TinyModelSettings
    from training.tiny_model import make_tiny_model

    full = resolve_model(given) if given is not None else make_tiny_model(root, TinyModelSettings())
    recipe = full / "recipe.json"
    if not recipe.is_file():
        return Models(full=full, slot=full)
    settings = TinyModelSettings(**json.loads(recipe.read_text())["settings"])
    return Models(full=full, slot=make_tiny_model(root, settings, prompts=PromptSettings(order_notation="slot")))
