"""What the decode benchmark asks an engine for: made-up decisions of a given size, and those of real rollouts.

Owns requests and nothing that measures. A made-up decision has as many units and orders as asked for, in the words of real
orders; no two are alike, so that no table and no prompt is ever seen twice. Real ones come from a start group that is rolled out.
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
from game.prompts import board_text, power_text, rules_text
from game.snapshot import Snapshot
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE
from rollouts.fork import Tokens
from rollouts.roll_out import StartGroup, roll_out
from rollouts.settings import RolloutSettings

_PLACES = """
ADR AEG ALB ANK APU ARM BAL BAR BEL BER BLA BOH BOT BRE BUD BUL BUR CLY CON DEN EAS EDI ENG FIN GAL GAS GRE HEL HOL ION IRI KIE
LON LVN LVP LYO MAO MAR MOS MUN NAF NAO NAP NTH NWG NWY PAR PIC PIE POR PRU ROM RUH RUM SER SEV SIL SKA SMY SPA STP SWE SYR TRI
TUN TUS TYR TYS UKR VEN VIE WAL WAR WES YOR
"""
PLACES = _PLACES.split()
PROMPT_TOKENS = 230
"""Prompt of a made-up decision: about that of a real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large made-up decisions are."""

    units: int
    fewest: int
    """Orders of a unit, at least."""
    most: int
    batch: int
    """Decisions in flight together."""


SHAPES = {
    "b32": Shape(units=4, fewest=10, most=60, batch=32),
    "b128": Shape(units=4, fewest=10, most=60, batch=128),
    "10units_b32": Shape(units=10, fewest=30, most=400, batch=32),
}


def made_up_orders(dice: random.Random, shape: Shape) -> LegalOrders:
    """Legal orders that nobody has seen before: moves and holds, and for the rest supports."""
    sites, options = [], []
    for place in dice.sample(PLACES, shape.units):
        near, size = dice.sample(PLACES, 12), dice.randint(shape.fewest, shape.most)
        own = {f"A {place} H", *(f"A {place} - {goal}" for goal in near[:6])}
        while len(own) < size:
            own.add(f"A {place} S {dice.choice('AF')} {dice.choice(PLACES)} - {dice.choice(near)}")
        sites.append(f"A {place}")
        options.append(tuple(sorted(own)))
    return LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=tuple(sites), options=tuple(options), picks=shape.units)


def made_up_prompt(dice: random.Random, tokens: Tokens, length: int = PROMPT_TOKENS) -> list[int]:
    """A prompt that shares its beginning with no other."""
    return [dice.randrange(tokens.codec.vocabulary_size) for _ in range(length)]


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
    """One movement phase of each game, from 1902 on, in games of movers."""
    found = []
    for game in range(games):
        dice, board, first = random.Random(f"decode {seed} {game}"), Board.start(), 1902 + game % 4
        while not board.is_over and (board.phase_type != "M" or board.year < first):
            board.step({power: player("mover")(legal, dice, board) for power, legal in board.legal_orders().items()})
        found.append(board.snapshot(game_id=f"decode-{game}", seed=game, source="benchmark"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One power's decision, in a board of its own."""

    board: Board
    legal: LegalOrders
    snapshot_id: str


def rollout_cases(positions: Sequence[Snapshot], *, forks: int, phases: int) -> list[Case]:
    """The open decisions of all powers in forks of `positions`, in the order in which a rollout asks for them.

    The forks are played on by random players, so that they part as they do under a policy that knows little.
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
    """The cases as requests, in the way of writing of `tokens`."""
    return [
        GenerationRequest(
            request_id=f"{label}/{number}",
            prompt_ids=tokens.codec.encode_prompt(
                (
                    rules_text(tokens.prompts),
                    board_text(case.board),
                    power_text(case.legal, case.board, tokens.prompts),
                )
            ),
            table=tokens.tables.table(case.legal),
            seed=number,
            snapshot_id=case.snapshot_id,
        )
        for number, case in enumerate(cases)
    ]


@dataclass(slots=True)
class Listener:
    """An engine as a rollout sees it, which notes what was asked for and what came."""

    engine: Any
    drawn: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.drawn.append((request, generation))
        return generation


class Instant:
    """An engine that takes no time: any legal completion, the same odds for every token."""

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


class ListeningTables:
    """A table builder which notes the legal orders that it was asked about."""

    def __init__(self, tables: Any) -> None:
        self._tables = tables
        self.asked: list[LegalOrders] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def table(self, legal: LegalOrders) -> Any:
        self.asked.append(legal)
        return self._tables.table(legal)


async def roll_out_group(
    snapshot: Snapshot, engine: Any, model_tokens: Tokens, *, number: int, forks: int, years: int
) -> tuple[list[tuple[GenerationRequest, Generation]], list[LegalOrders]]:
    """One start group, all seven powers played by the policy; what was drawn, and the legal orders that tables were made for."""
    listener, tables = Listener(engine), ListeningTables(model_tokens.tables)
    tokens = Tokens(model_tokens.codec, model_tokens.prompts)
    tokens.tables = tables  # type: ignore[assignment]
    await roll_out(
        [StartGroup(number=number, snapshot=snapshot, power=None)],
        listener,  # type: ignore[arg-type]  # an engine in all that a rollout asks of it
        tokens,
        RolloutSettings(forks_per_group=forks, horizon_years=years, policy_powers="all"),
        producer="benchmark",
        seed=0,
    )
    return listener.drawn, tables.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What is measured with."""

    full: Path
    """Folder of a model that answers in full notation."""
    slot: Path
    """Folder of a model of the same shape that answers in slots; any model but a tiny one writes both alike."""


def models_to_measure(given: Path | None, root: Path) -> Models:
    """`given` or the tiny model of the usual recipe, and its twin that learned to write in slots; made under `root` if need be.

    A tokenizer spends many tokens on words that it never saw, so that each way of writing wants a tiny model of its own.
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
