"""Snapshots as questions for another trainer's model, and what an answer is worth.

A question asks one power for its orders in a movement phase. An answer is text: a unit without a legal order in it holds, as the
rules say. It is played to the horizon; later decisions of the power are drawn by the scripted player `random`, because another
trainer asks its model once a sample. What an answer is worth are the reward components from the question to the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from game.board import POWERS, Board
from game.legal import LegalOrders, OrderKind
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS
from game.prompts import board_text, power_text, rules_text
from game.scores import components
from game.snapshot import Snapshot
from rollouts.deciders import DecisionRequest
from rollouts.fork import ForkPlan, play_fork
from rollouts.opponents import draw_opponents
from rollouts.roll_out import SETTLED_YEARS
from rollouts.seeds import dice
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from telemetry.errors import EngineError, InputError

_SEAT = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A position and a power that decides there."""

    text: str
    """The prompt, up to the cue for the orders."""
    snapshot: Snapshot
    power: str
    legal: LegalOrders


def questions_of(positions: Sequence[Snapshot], *, seed: int) -> list[Question]:
    """One question for each position at which a power, drawn as in a run, moves and has a choice.

    Raises:
        InputError: there is none.
    """
    found = []
    for snapshot, power in sample_start_positions(positions, len(positions), seed, 0):
        board = Board.restore(snapshot)
        legal = board.legal_orders().get(power)
        if legal is not None and legal.kind is OrderKind.MOVEMENT and not legal.is_forced:
            shown = board_text(board, power, DEFAULT_PROMPTS) + power_text(legal, board, DEFAULT_PROMPTS)
            found.append(Question(text=rules_text(DEFAULT_PROMPTS) + shown, snapshot=snapshot, power=power, legal=legal))
        board.release()
    if not found:
        raise InputError(f"none of the {len(positions)} positions asks a power to move: build a state cache with movement phases")
    return found


def read_orders(text: str, legal: LegalOrders) -> tuple[list[str], int]:
    """The orders that an answer gives in a movement phase, in the order of the sites, and the number of units that it orders.

    A unit takes the first line that is one of its legal orders, at any place of the answer.
    """
    lines = [line.strip() for line in text.split("\n")]
    ordered = [next((line for line in lines if line in options), None) for options in legal.options]
    orders = [order or f"{site} H" for order, site in zip(ordered, legal.sites, strict=True)]
    return orders, len(orders) - ordered.count(None)


def check_opponents(rollouts: RolloutSettings) -> None:
    """Check that all opponents are scripted players: there is no engine for versions of a run.

    Raises:
        InputError: one is not.
    """
    if engines := [name for name, _ in rollouts.opponent_table if name not in rollouts.scripted_opponents]:
        raise InputError(f"these games have scripted opponents only, not {', '.join(engines)}: change rollouts.opponents")


async def score_orders(
    question: Question, orders: Sequence[str], rollouts: RolloutSettings, *, shared: str, name: str, board: Board | None = None
) -> Mapping[str, float]:
    """Reward components of a legal order set, by name in `game.scores.COMPONENTS`.

    Args:
        shared: names the luck of opponents and later decisions; equal names give answers to one question equal luck.
        name: of the fork, unique among those that share their luck.
        board: a fork of the question's position that may be played; None: one is restored.

    Raises:
        EngineError: the fork failed.
    """
    if board is None:
        board = Board.restore(question.snapshot)
    others = [power for power in POWERS if power != question.power]
    plan = ForkPlan(
        name=f"{shared}/{name}",
        shared_name=shared,
        seats={question.power: _SEAT}
        | draw_opponents(shared, rollouts.opponent_table, others, by_seat=rollouts.opponents_by == "seat"),
        horizon_years=rollouts.horizon_years,
        settled_years=SETTLED_YEARS,
        last_winter=rollouts.last_winter,
        temperature=1.0,
        snapshot_id=question.snapshot.snapshot_id,
    )
    fork = await play_fork(plan, board, None, None, deciders={_SEAT: _FirstOrders(orders, shared)}, record_plies=False)
    if fork.start is None or fork.end is None or fork.status != "complete":
        raise EngineError(f"the fork of an answer failed: {fork.reason}")
    return components(fork.start, fork.end, question.power)


@dataclass(frozen=True, slots=True)
class _FirstOrders:
    """Gives these orders first, then those of the player `random`."""

    orders: Sequence[str]
    shared: str

    async def decide(self, request: DecisionRequest) -> list[str]:
        if request.ply == 0:
            return list(self.orders)
        return player("random")(request.legal, dice(self.shared, request.board.phase, request.power), request.board)
