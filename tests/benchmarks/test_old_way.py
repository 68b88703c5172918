"""The old way is what it says: its decoder allows what its own did, its clones part, its advantages and losses add up."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.old_way.learn import standardise
from benchmarks.old_way.play import OldRollouts, Row
from benchmarks.old_way.trie import OrderTrie
from decoding.legal_table import END
from records.generation import Generation
from records.policy_version import BASE
from rollouts.fork import Tokens
from rollouts.settings import RolloutSettings

MOVES = {"A PAR": ["A PAR H", "A PAR - BUR", "A PAR - PIC"], "A MAR": ["A MAR H", "A MAR - BUR", "A MAR S A PAR - BUR"]}


def tokenizer_of(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def trie_of(model: Path, tokens: Tokens, wanted: int = 2) -> OrderTrie:
    return OrderTrie(tokenizer_of(model), MOVES, wanted, tokens.codec.eos_id)


# -- the decoder -------------------------------------------------------------------------------------------------------------


def walk(trie: OrderTrie, tokens: Tokens, dice: random.Random) -> list[int]:
    drawn: list[int] = []
    state = trie.start
    while state != END:
        drawn.append(dice.choice(trie.allowed(state).tolist()))
        state = trie.advance(state, drawn[-1])
    assert drawn[-1] == tokens.codec.eos_id
    return drawn


def test_whatever_is_allowed_spells_legal_orders_of_different_units_that_do_not_meet(model, tokens):
    given = set()
    for seed in range(200):
        drawn = walk(trie_of(model, tokens), tokens, random.Random(seed))
        text = tokens.codec.decode(token for token in drawn if token != tokens.codec.eos_id)
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        assert all(line in MOVES["A PAR"] + MOVES["A MAR"] for line in lines)
        assert len({line[:5] for line in lines}) == len(lines)
        assert sum(line.endswith("- BUR") and " S " not in line for line in lines) <= 1
        given.add(len(lines))
    assert given == {0, 1, 2}, "units may be left out, which is a fault that it had"


# -- prompts, clones, warm-up --------------------------------------------------------------------------------------------------


# -- playing, and files --------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine of generate calls that draws any legal completion, and notes how many it has in each call."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens, self.calls = tokens, list[list[str]]()

    async def generate_call(self, asks: Any) -> Any:
        self.calls.append([asked["name"] for asked in asks])
        return [(self._tokens.codec.encode(asked["prompt"]), self._draw(asked)) for asked in asks]

    def _draw(self, asked: dict[str, Any]) -> Generation:
        sites = list(asked["valid_moves"].values())[: asked["wanted"]]
        text = "\n".join(random.Random(asked["seed"]).choice(own) for own in sites)
        ids = np.array([*self._tokens.codec.encode(text), self._tokens.codec.eos_id], np.int32)
        return Generation(token_ids=ids, logprobs=np.full(len(ids), -0.5, np.float32), policy=BASE, worker="w")


def played(
    tokens: Tokens, model: Path, positions: Any, folder: Path, powers: str = "one"
) -> tuple[list[Row], OldRollouts, Scripted]:
    rollouts = RolloutSettings(start_groups=2, forks_per_group=3, horizon_years=1, policy_powers=powers)
    engine: Any = Scripted(tokens)
    game = OldRollouts(model, engine, rollouts, positions, 1, folder)
    return asyncio.run(game.roll_out(2)), game, engine


def test_forks_advance_in_lock_step_and_a_warm_up_keeps_no_rows(model, tokens, positions, tmp_path):
    rows, game, engine = played(tokens, model, positions, tmp_path)
    warm_ups = sum("/warm/" in name for call in engine.calls for name in call)
    assert warm_ups == game.counts["warm_up_decisions"] > 0 and {row.group for row in rows} == {2, 3}
    assert sum(map(len, engine.calls)) == warm_ups + len(rows) and game.counts["forks"] == 6
    assert max(len(call) for call in engine.calls if "/warm/" not in call[0]) == 3, "one decision of each fork in a call"
    assert all({name.split("/")[-2] for name in call} == {call[0].split("/")[-2]} for call in engine.calls), "of one ply"


# -- the trainer ---------------------------------------------------------------------------------------------------------------


def test_advantages_of_old_by_hand():
    returns, groups = np.array([0.0, 2.0, 5.0, 5.0, 8.0]), np.array([0, 0, 1, 1, 1])
    inside = np.array([-1.0, 1.0, -1 / np.sqrt(2), -1 / np.sqrt(2), np.sqrt(2)])
    assert standardise(returns, groups) == pytest.approx((inside - inside.mean()) / inside.std(), rel=1e-5)
