"""The old way is what it says: its decoder allows what its own did, its clones part, its advantages and losses add up."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.old_way.learn import KL_WEIGHT, OldTrainer, read_rows, standardise
from benchmarks.old_way.play import Fork, OldRollouts, Row, ask, clones, warm_up_phases
from benchmarks.old_way.prompts import HEAD
from benchmarks.old_way.trie import OrderTrie, TrieRows
from game.board import POWERS, Board
from game.scores import Standing
from game.settings import BoardPath
from records.generation import Generation
from records.policy_version import BASE
from rollouts.fork import Tokens
from rollouts.settings import RolloutSettings

MOVES = {"A PAR": ["A PAR H", "A PAR - BUR", "A PAR - PIC"], "A MAR": ["A MAR H", "A MAR - BUR", "A MAR S A PAR - BUR"]}


def tokenizer_of(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def trie_of(model: Path, tokens: Tokens, wanted: int = 2) -> OrderTrie:
    return OrderTrie(tokenizer_of(model), MOVES, wanted, tokens.codec.eos_id, tokens.codec.separator_id)


# -- the decoder -------------------------------------------------------------------------------------------------------------


def walk(trie: OrderTrie, tokens: Tokens, dice: random.Random) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < 200:
        token = dice.choice(trie.allowed())
        drawn.append(token)
        if token == tokens.codec.eos_id:
            return drawn
        trie.advance(token)
    raise AssertionError("no end")


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


def test_rows_mask_by_their_own_trie_and_follow_every_move(model, tokens):
    rows, outputs = TrieRows(), [[], []]
    first, second = trie_of(model, tokens), trie_of(model, tokens, wanted=0)
    rows.add(0, first, outputs[0])
    rows.add(1, second, outputs[1])
    masked = rows.mask(torch.zeros(2, tokens.codec.vocabulary_size))
    assert set(torch.isfinite(masked[0]).nonzero()[:, 0].tolist()) == set(first.allowed())
    assert torch.isfinite(masked[1]).nonzero()[:, 0].tolist() == [tokens.codec.eos_id]
    rows.move(0, 1, swap=True)
    token = tokenizer_of(model).encode("A PAR H", add_special_tokens=False).ids[0]
    outputs[0].append(token)
    masked = rows.mask(torch.zeros(2, tokens.codec.vocabulary_size))
    assert torch.isfinite(masked[0]).nonzero()[:, 0].tolist() == [tokens.codec.eos_id]
    expected = trie_of(model, tokens)
    expected.advance(token)
    assert set(torch.isfinite(masked[1]).nonzero()[:, 0].tolist()) == set(expected.allowed())


# -- prompts, clones, warm-up --------------------------------------------------------------------------------------------------


def test_the_prompt_names_the_power_first_so_that_powers_share_the_head_alone():
    board = Board.start()
    one, other = (ask("", board, board.legal_orders()[power], 1.0)["prompt"] for power in ("FRANCE", "TURKEY"))
    shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert len(HEAD) < shared < len(HEAD) + 30
    assert 700 < len(one) < 1800, "1,304 characters on average"


def test_clones_part_from_one_another():
    one, other = clones(Board.start(path=BoardPath.PLAIN), 2)
    before = other.units()
    one.step({"FRANCE": ["A PAR - BUR", "F BRE H", "A MAR H"]})
    assert one.units() != before and other.units() == before and other.phase == "S1901M"


def test_a_fifth_of_the_rollouts_has_no_warm_up_and_the_others_up_to_eight_phases():
    drawn = [warm_up_phases(0, number) for number in range(4000)]
    assert set(drawn) == set(range(9))
    assert 0.26 < drawn.count(0) / 4000 < 0.32, "0.2 and a ninth of the rest"


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


def test_with_all_powers_each_is_rewarded_for_its_own_centres(model, tokens, positions, tmp_path):
    rows, _, _ = played(tokens, model, positions, tmp_path, powers="all")
    assert {row.power for row in rows} == set(POWERS)
    for row in rows:
        seat = POWERS.index(row.power)
        assert row.after is not None and row.reward == row.after.centres[seat] - row.before.centres[seat]


def test_a_step_reads_the_texts_that_were_written_and_groups_without_spread_teach_nothing(model, tokens, positions, tmp_path):
    rows, game, _ = played(tokens, model, positions, tmp_path)
    for row in rows:
        row.after = Standing(centres=tuple(row.before.centres[seat] + (row.fork % 2) * (row.group == 2) for seat in range(7)))
    files = game.write(7, rows)
    assert [file.name for file in sorted(files.iterdir())] == ["rollout-000002.json", "rollout-000003.json"]
    batch = read_rows(files, tokenizer_of(model), tokens.codec.eos_id)
    groups = [[row for row in rows if (row.group, row.power, row.ply) == (2, power, ply)]
              for power in POWERS for ply in range(20)]  # fmt: skip
    kept = [row for own in groups if len({row.reward for row in own}) > 1 for row in own]
    assert len(batch.returns) == len(kept) > 0 and set(batch.returns.tolist()) == {0.0, 1.0}
    ends = batch.input_offsets[1:]
    assert (batch.input_ids[ends - 1] == tokens.codec.eos_id).all()
    texts = {tokens.codec.decode(ids[:length]) for ids, length in
             zip(np.split(batch.input_ids, ends[:-1]), batch.prompt_lens, strict=True)}  # fmt: skip
    assert texts == {row.prompt for row in kept}


def test_a_fork_ends_at_its_horizon_or_when_no_centre_has_changed_for_long():
    class Still:
        is_over, phase, owned = False, "S1901M", 0

        def is_alive(self, power: str) -> bool:
            return True

        def centres(self) -> int:
            return self.owned

    def ends(years: int, changes: dict[int, str]) -> str:
        board: Any = Still()
        fork = Fork(number=0, board=board, group=0, start="S1901M", centres=0, now=Standing(centres=(3,) * 7))
        for fork.ply in range(1, 20):
            board.phase = f"S{1901 + fork.ply}M"
            board.owned += fork.ply in changes
            if fork.is_over(["FRANCE"], RolloutSettings(horizon_years=years, settled_years=2)):
                return board.phase
        raise AssertionError("no end")

    assert ends(4, {}) == "S1903M" and ends(4, {1: "centres"}) == "S1904M"
    assert ends(4, dict.fromkeys(range(1, 4), "centres")) == "S1905M"


# -- the trainer ---------------------------------------------------------------------------------------------------------------


def test_advantages_of_old_by_hand():
    returns, groups = np.array([0.0, 2.0, 5.0, 5.0, 8.0]), np.array([0, 0, 1, 1, 1])
    inside = np.array([-1.0, 1.0, -1 / np.sqrt(2), -1 / np.sqrt(2), np.sqrt(2)])
    assert standardise(returns, groups) == pytest.approx((inside - inside.mean()) / inside.std(), rel=1e-5)


class TwoLogits(torch.nn.Module):
    """A model of two ids, whose adapter is one number; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.forwards, self._on = torch.nn.Parameter(torch.tensor(0.5)), 0, True

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        self.forwards += 1
        logits = torch.stack([self.adapter * self._on + 0.0 * input_ids, torch.zeros(input_ids.shape)], dim=-1)
        return SimpleNamespace(logits=logits)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._on = False
        yield
        self._on = True


def test_without_the_divergence_the_old_step_has_one_forward_and_no_term_for_it():
    ids = np.array([0, 1, 0], np.int32)
    batch: Any = SimpleNamespace(
        input_ids=ids, input_offsets=np.array([0, 3]), prompt_lens=np.array([1]), completion_offsets=np.array([0, 2]),
        behaviour_logprobs=np.log(np.full(2, 0.5, np.float32)),
    )  # fmt: skip
    losses, advantages = {}, np.array([1.0], np.float32)
    for divergence, forwards in ((True, 2), (False, 1)):
        model = TwoLogits()
        losses[divergence] = OldTrainer(model, recompute=False, divergence=divergence).accumulate(batch, advantages)
        assert model.forwards == forwards
    now = np.log([1 - 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(-0.5))])
    off = np.log(0.5) - now
    assert losses[True] - losses[False] == pytest.approx(KL_WEIGHT * (np.exp(off) - off - 1).mean(), rel=1e-3)
    assert losses[False] == pytest.approx(-np.minimum(np.exp(now) / 0.5, 1.2).mean(), rel=1e-5)
