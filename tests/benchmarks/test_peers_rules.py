"""Grammars and rewards for peers say the same as our own tables and rules."""

import itertools
import random

import pytest

from benchmarks.decode_cases import played_positions
from benchmarks.peers.grammars import AnswerRules, answer_rules
from benchmarks.peers.referee import Referee
from game.board import Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.players import player
from integrations.questions import Question
from rollouts.settings import RolloutSettings
from telemetry.errors import InputError


def legal(kind: OrderKind, options: list[list[str]], picks: int | None = None) -> LegalOrders:
    sites = tuple(own[0][:5] for own in options)
    return LegalOrders(
        power="FRANCE",
        kind=kind,
        sites=sites,
        options=tuple(map(tuple, options)),
        picks=len(options) if picks is None else picks,
    )


MOVES = legal(OrderKind.MOVEMENT, [["A PAR - BUR", "A PAR H"], ["F BRE - ENG", "F BRE H", "F BRE S A PAR - PIC"]])
BUILDS = legal(OrderKind.BUILD, [["A BRE B", "F BRE B"], ["A MAR B", "F MAR B"], ["A PAR B"]], picks=2)
DISBANDS = legal(OrderKind.DISBAND, [["A PAR D"], ["A BUR D"], ["F BRE D"], ["F MAR D"]], picks=2)
KINDS = pytest.mark.parametrize("asked", [MOVES, BUILDS, DISBANDS], ids=["movement", "build", "disband"])


def language(answer: AnswerRules, rule: str = "start") -> list[str]:
    """Every text of the rules, each as often as the rules spell it."""
    texts = []
    for terminal, after in answer.rules[rule]:
        tails = [f"\n{tail}" for tail in language(answer, after)] if after else [""]
        texts += [line + tail for line in answer.terminals[terminal] for tail in tails]
    return texts


def legal_texts(asked: LegalOrders) -> list[str]:
    """By trying every sequence of lines."""
    lines = [*(line for own in asked.options for line in own), *([WAIVE] if asked.kind is OrderKind.BUILD else [])]
    return ["\n".join(orders) for orders in itertools.product(lines, repeat=asked.picks) if asked.admits(orders)]


@KINDS
def test_the_rules_spell_every_legal_answer_once_and_nothing_else(asked: LegalOrders):
    answer = answer_rules(asked)
    assert all(answer.rules.values()), "a rule without alternatives is a dead end"
    assert sorted(language(answer)) == sorted(legal_texts(asked))


def test_rewards_are_centres_gained_with_shared_luck_and_everything_is_counted():
    (snapshot,) = played_positions(1, seed=1)
    board = Board.restore(snapshot)
    power, asked = max(board.legal_orders().items(), key=lambda pair: pair[1].count())
    dice = random.Random(0)
    texts = ["\n".join(player("mover")(asked, dice, board)) for _ in range(5)]
    question = Question(text="", snapshot=snapshot, power=power, legal=asked)
    referee = Referee(questions=[question], rollouts=RolloutSettings(horizon_years=1, forks_per_group=8))
    reply = referee.reply({"numbers": [0] * 8, "texts": [*texts, texts[0], texts[0], "nonsense"]})
    rewards = reply["rewards"]
    assert isinstance(rewards, list) and len(rewards) == 8 and rewards[0] == rewards[5] == rewards[6]
    assert (referee.played, referee.legal) == (8, 7) and reply["cpu_s"] > 0
    assert referee.units == 8 * len(asked.sites) and referee.ordered == 7 * len(asked.sites)
    assert referee.with_spread == (8 if len(set(rewards)) > 1 else 0)
    assert all(reward == round(reward) for reward in rewards)


def test_the_referee_refuses_opponents_that_need_an_engine():
    with pytest.raises(InputError, match="scripted opponents only, not v0, league"):
        Referee(questions=[], rollouts=RolloutSettings(opponents="dumbbot,v0,league"))
