"""The old way is what it says: its decoder allows what its own did, its clones part, its advantages and books add up."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.old_trainer import KL_WEIGHT, OldTrainer
from benchmarks.old_way.games import Start, clones, warm_up_phases
from benchmarks.old_way.json_prompts import HEAD, prompt_text
from benchmarks.old_way.learn import standardise
from benchmarks.old_way.play import Row, Table
from benchmarks.old_way.play import _Fork as Fork
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trajectories import read, write
from benchmarks.old_way.trie import OrderTrie, TrieRows
from benchmarks.old_way.ways import IMPROVEMENTS, NEW, OLD, Way
from benchmarks.rollout import shares
from game.board import POWERS, Board
from game.scores import Standing
from game.settings import BoardPath
from records.generation import Generation
from records.policy_version import BASE
from rollouts.fork import Tokens

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


def test_after_as_many_orders_as_are_wanted_only_the_end_is_left(model, tokens):
    trie = trie_of(model, tokens, wanted=1)
    for token in tokenizer_of(model).encode("A PAR H\n", add_special_tokens=False).ids:
        assert token in trie.allowed()
        trie.advance(token)
    assert trie.allowed() == [tokens.codec.eos_id]


def test_rows_mask_by_their_own_trie_and_follow_every_move(model, tokens):
    rows, outputs, record = TrieRows(), [[], []], []
    first, second = trie_of(model, tokens), trie_of(model, tokens, wanted=0)
    rows.add(0, first, outputs[0], record)
    rows.add(1, second, outputs[1], None)
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
    assert len(record) == 2 and record[1] == sorted(expected.allowed())


# -- prompts, clones, warm-up --------------------------------------------------------------------------------------------------


def test_the_prompt_names_the_power_first_so_that_powers_share_the_head_alone():
    board = Board.start()
    one, other = (prompt_text(board, board.legal_orders()[power]) for power in ("FRANCE", "TURKEY"))
    shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert len(HEAD) < shared < len(HEAD) + 30
    assert 700 < len(one) < 1800, "1,304 characters on average"


@pytest.mark.parametrize("way", [OLD, NEW], ids=["pickled", "forked"])
def test_clones_part_from_one_another(way: Way):
    board = Board.start(path=BoardPath.FAST if way.fast_board else BoardPath.PLAIN)
    one, other = clones(way, board, 2, StageClock())
    before = other.units()
    one.step({"FRANCE": ["A PAR - BUR", "F BRE H", "A MAR H"]})
    assert one.units() != before and other.units() == before and other.phase == "S1901M"


def test_a_fifth_of_the_rollouts_has_no_warm_up_and_the_others_up_to_eight_phases():
    drawn = [warm_up_phases(0, number) for number in range(4000)]
    assert set(drawn) == set(range(9))
    assert 0.26 < drawn.count(0) / 4000 < 0.32, "0.2 and a ninth of the rest"
    assert drawn[:50] == [warm_up_phases(0, number) for number in range(50)]


# -- rows on their way to the trainer ------------------------------------------------------------------------------------------


def rows_for(tokens: Tokens) -> list[Row]:
    found = []
    for fork in range(4):
        spelled = tokens.tables.spell_lines(["A PAR H", "A MAR - BUR"] if fork % 2 else ["A PAR - PIC", "A MAR H"])
        start = Standing(centres=(3,) * 7)
        found.append(
            Row(
                group=5,
                fork=fork,
                ply=0,
                power="FRANCE",
                phase="S1901M",
                prompt="FRANCE MOVEMENT\n",
                prompt_ids=list(tokens.codec.encode("FRANCE MOVEMENT\n")),
                generation=Generation(
                    token_ids=np.array(spelled, np.int32),
                    logprobs=np.linspace(-1, -0.1, len(spelled)).astype(np.float32),
                    policy=BASE,
                    worker="w",
                ),
                legal_ids=np.array(spelled, np.int32),
                legal_offsets=np.arange(len(spelled) + 1, dtype=np.int32),
                orders=("A PAR H",),
                before=start,
                after=replace(start, centres=(3, 3, 3 + fork % 3, 3, 3, 3, 3)),
                until=replace(start, centres=(3, 3, 3 + fork % 3, 3, 3, 3, 3)),
            )
        )
    return found


@pytest.mark.parametrize("arrow", [False, True], ids=["json", "arrow"])
@pytest.mark.parametrize("kept", [False, True], ids=["texts", "ids"])
def test_either_way_a_step_reads_the_rows_that_were_written(model, tokens, tmp_path, arrow: bool, kept: bool):
    way, rows = replace(OLD, arrow=arrow, kept_tokens=kept, packing=True), rows_for(tokens)
    write(way, tmp_path, 3, rows, tokens.codec)
    batch, rolled = read(way, tmp_path, 3, tokenizer_of(model), tokens.codec.eos_id)
    assert rolled == len(batch.returns) == 4 and batch.advantage_groups.tolist() == [0] * 4
    order = np.argsort(batch.returns, kind="stable")
    by_reward = sorted(rows, key=lambda row: row.reward)
    assert batch.returns[order].tolist() == [row.reward for row in by_reward]
    expected = {(tuple(row.prompt_ids), tuple(row.generation.token_ids.tolist())) for row in rows}
    seen = set()
    for row in range(4):
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
        seen.add((tuple(ids[: batch.prompt_lens[row]]), tuple(ids[batch.prompt_lens[row] :])))
    assert seen == expected
    assert batch.legal_ids.tolist() == np.concatenate(
        [batch.input_ids[s + p : e] for s, e, p in zip(
            batch.input_offsets[:-1], batch.input_offsets[1:], batch.prompt_lens, strict=True)]
    ).tolist()  # fmt: skip


@pytest.mark.parametrize("arrow", [False, True], ids=["json", "arrow"])
def test_a_group_without_spread_teaches_nothing_in_either_way(model, tokens, tmp_path, arrow: bool):
    rows = rows_for(tokens)
    for row in rows:
        row.after = row.until = row.before
    write(replace(OLD, arrow=arrow), tmp_path, 1, rows, tokens.codec)
    batch, rolled = read(replace(OLD, arrow=arrow), tmp_path, 1, tokenizer_of(model), tokens.codec.eos_id)
    assert rolled == 4 and len(batch.returns) == 0


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


# -- books -------------------------------------------------------------------------------------------------------------------


def test_the_ways_differ_in_every_improvement_and_in_nothing_else():
    assert all(getattr(NEW, name) and not getattr(OLD, name) for name in IMPROVEMENTS)
    others = [field.name for field in fields(Way) if field.name not in IMPROVEMENTS]
    assert all(getattr(NEW, name) == getattr(OLD, name) for name in others)


def test_stages_count_each_moment_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.old_way.stages.time", SimpleNamespace(process_time=lambda: now[0]))
    clock = StageClock()
    with clock("outer"):
        now[0] += 2
        with clock("inner"):
            now[0] += 5
        now[0] += 1
    now[0] += 100
    assert dict(clock.cpu_s) == {"outer": 3.0, "inner": 5.0}


def test_shares_add_up_to_the_whole():
    found = shares([{"cpu_s": 8.0, "stage_inference": 4.0, "stage_games": 2.0}, {"cpu_s": 2.0, "stage_inference": 1.0}])
    assert found == {"inference": 0.5, "games": 0.2, "rest": pytest.approx(0.3)}


# -- playing ---------------------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine of the new kind that draws any legal completion, and notes how many it has at a time."""

    def __init__(self) -> None:
        from benchmarks.decode_cases import InstantEngine

        self._instant, self.asked = InstantEngine(), []

    async def generate(self, request: Any) -> Generation:
        self.asked.append(request.request_id)
        return await self._instant.generate(request)


async def _played(
    tokens: Tokens, positions: Any, in_flight: bool, snapshots: bool = True, power: str | None = "FRANCE", years: int = 1
) -> tuple[list[Row], Table]:
    way = replace(NEW, in_flight=in_flight, snapshots=snapshots)
    game = Table(way=way, engine=Scripted(), codec=tokens.codec, clock=StageClock())  # type: ignore[arg-type]
    start = Start(number=3, snapshot=positions[0], power=power)
    return await game.roll_out(start, seed=1, forks=3, years=years), game


def test_in_lock_step_and_in_flight_the_same_games_are_played(tokens, positions):
    import asyncio

    (one, _), (other, _) = (asyncio.run(_played(tokens, positions, in_flight)) for in_flight in (True, False))
    key = lambda row: (row.fork, row.ply)  # noqa: E731
    assert [row.orders for row in sorted(one, key=key)] == [row.orders for row in sorted(other, key=key)]
    assert one and all(row.after is not None and row.until is not None for row in one)


def test_with_all_powers_each_decides_and_is_rewarded_for_its_own_centres(tokens, positions):
    import asyncio

    rows, _ = asyncio.run(_played(tokens, positions, in_flight=False, power=None))
    assert {row.power for row in rows} == set(POWERS)
    assert len({(row.fork, row.ply, row.power) for row in rows}) == len(rows)
    for fork in range(3):
        for seat, power in enumerate(POWERS):
            own = sorted((row for row in rows if (row.fork, row.power) == (fork, power)), key=lambda row: row.ply)
            assert [row.until for row in own[:-1]] == [row.before for row in own[1:]] and own[-1].until is own[-1].after
            assert all(row.reward == row.after.centres[seat] - row.before.centres[seat] for row in own if row.after)


def test_a_fork_ends_at_its_horizon_or_when_no_centre_has_changed_for_long():
    class Still:
        is_over, phase, owned = False, "S1901M", 0

        def is_alive(self, power: str) -> bool:
            return True

        def centres(self) -> int:
            return self.owned

    def ends(years: int, changes: dict[int, str]) -> str:
        board: Any = Still()
        fork = Fork(number=0, board=board, shared="", powers=["FRANCE"], group=0, start="S1901M", years=years, settled_years=2,
                    changed="S1901M", centres=0, now=Standing(centres=(3,) * 7))  # fmt: skip
        for fork.ply in range(1, 20):
            board.phase = f"S{1901 + fork.ply}M"
            board.owned += fork.ply in changes
            if fork.is_over(StageClock()):
                return board.phase
        raise AssertionError("no end")

    assert ends(4, {}) == "S1903M" and ends(4, {1: "centres"}) == "S1904M" and ends(1, {}) == "S1902M"
    assert ends(4, dict.fromkeys(range(1, 4), "centres")) == "S1905M"


def test_a_warm_up_draws_for_every_seat_and_keeps_none_of_it(tokens, positions):
    import asyncio

    rows, game = asyncio.run(_played(tokens, positions, in_flight=True, snapshots=False))
    phases = warm_up_phases(1, 3)
    assert phases > 0 and game.counts.warm_up_decisions > phases
    asked = game.engine.asked  # type: ignore[attr-defined]  # it is scripted
    assert len(asked) == game.counts.warm_up_decisions + len(rows)
