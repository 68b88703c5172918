"""The automaton accepts exactly the legal sets, each by one path. Damaged tables are refused."""

import asyncio

import pytest

from entente.decoding.codec import Codec
from entente.game.board import POWERS, Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.prompts import PromptSettings, rules_text
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer, Tokens
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import DataError, InputError

MOVEMENT = LegalOrders(
    power="FRANCE",
    kind=OrderKind.MOVEMENT,
    sites=("F BRE", "A PAR"),
    options=(
        ("F BRE - ENG", "F BRE - MAO", "F BRE H"),
        ("A PAR - BUR", "A PAR - GAS", "A PAR H", "A PAR S F BRE"),
    ),
    picks=2,
)


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 0)], ids=["stops early", "is empty"])
def test_a_completion_that_stops_early_is_refused(tokens: Tokens, cut: slice):
    completion = tokens.tables.spell(["F BRE - MAO", "A PAR H"], MOVEMENT)[cut]
    with pytest.raises(DataError):
        tokens.tables.table(MOVEMENT).legal_sets(completion)


def test_a_token_outside_its_legal_set_is_refused(tokens: Tokens):
    completion = tokens.tables.spell(["F BRE - MAO", "A PAR H"], MOVEMENT)
    with pytest.raises(DataError, match="not legal"):
        tokens.tables.table(MOVEMENT).legal_sets([completion[0], completion[0], *completion[2:]])
    with pytest.raises(DataError, match="after its end"):
        tokens.tables.table(MOVEMENT).legal_sets([*completion, completion[0]])


def test_what_is_not_legal_cannot_be_spelled(tokens: Tokens):
    with pytest.raises(InputError, match=r"FRANCE cannot order 'A PAR - MAR'"):
        tokens.tables.spell(["F BRE H", "A PAR - MAR"], MOVEMENT)


@pytest.mark.parametrize("listed", ["none", "lines"])
def test_a_fork_is_played_in_every_way_of_writing_prompts(model, uniform_engine, positions, listed):
    """Prompts, completions and orders fit together, and the board rejects no order."""
    prompts = PromptSettings(legal_orders=listed)
    tokens = Tokens(Codec(model), prompts)
    plan = ForkPlan(
        name="fork",
        shared_name="group",
        seats=dict.fromkeys(POWERS, POLICY),
        horizon_years=1,
        temperature=1.0,
        snapshot_id=positions[0].snapshot_id,
    )
    course = asyncio.run(play_fork(plan, Board.restore(positions[0]), {POLICY: PolicyPlayer(uniform_engine(), tokens)}))
    assert course.status == "complete" and len(course.decisions) > 7
    assert not any(decision.orders_rejected for decision in course.decisions)
    for decision in course.decisions:
        prompt = tokens.codec.decode(decision.input_ids[: decision.prompt_len])
        assert prompt.startswith(rules_text(prompts)) and prompt.endswith("ORDERS:\n")
        spelled = tokens.codec.decode(decision.input_ids[decision.prompt_len : -1])  # without the end token
        assert [line for line in spelled.split("\n") if line != WAIVE] == list(decision.orders)
