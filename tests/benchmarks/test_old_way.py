"""The old way is what it says: its decoder allows what its own did, its clones part, its advantages and books add up."""

import random
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.ablation import arms, cpu_a_step, table
from benchmarks.end_to_end import figures
from benchmarks.kept_arms import KeptArms
from benchmarks.old_way.games import Start, clones, warm_up_phases
from benchmarks.old_way.json_prompts import HEAD, prompt_text
from benchmarks.old_way.learn import standardise
from benchmarks.old_way.play import Row, Table
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trajectories import read, write
from benchmarks.old_way.trie import OrderTrie, TrieRows
from benchmarks.old_way.ways import IMPROVEMENTS, NEW, OLD, Way
from benchmarks.rollout import shares
from game.board import Board
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


# -- books -------------------------------------------------------------------------------------------------------------------


def test_the_ways_differ_in_every_improvement_and_in_nothing_else():
    assert all(getattr(NEW, name) and not getattr(OLD, name) for name in IMPROVEMENTS)
    others = [field.name for field in fields(Way) if field.name not in IMPROVEMENTS]
    assert all(getattr(NEW, name) == getattr(OLD, name) for name in others)
    assert {f"old+{name}" for name in IMPROVEMENTS} | {f"new-{name}" for name in IMPROVEMENTS} <= set(arms())


def test_a_steps_cost_is_put_together_from_what_each_decision_costs():
    arm = {"rolled": 50.0, "trained": 20.0, "cpu_inference": 5.0, "cpu_games": 5.0, "cpu_train": 8.0, "cpu_save": 2.0}
    assert cpu_a_step(arm, rolled=100, trained=40) == pytest.approx(2 * 10 + 2 * 10)


def test_the_table_says_gains_over_old_and_losses_over_new():
    def arm(seconds: float) -> dict[str, float]:
        return {"rolled": 1.0, "trained": 1.0, "cpu_inference": seconds}

    results = {name: arm(16.0 if name.startswith("old") else 2.0) for name in arms()}
    results |= {"old+packing": arm(8.0), "new-packing": arm(6.0)}
    found = table(results, rolled=1, trained=1)
    assert found["ablation_speedup"] == 8 and found["gain_packing"] == 2 and found["loss_packing"] == 3
    assert found["gain_arrow"] == 1 and found["loss_arrow"] == 1


def test_a_step_of_old_is_scaled_to_as_many_trained_decisions():
    new: dict[str, Any] = {
        "step_s": [2.0, 2.0], "train_s": [1.0, 1.0], "orchestration_s": [0.1, 0.1],
        "train/decisions": [100.0, 100.0], "rollout/decisions": [150.0, 150.0], "cpu_a_step": 3.0, "lags": [0, 1, 1, 2],
    }  # fmt: skip
    step = {"wall_s": 40.0, "cpu_s": 60.0, "train_s": 10.0, "trained": 200}
    old = {"steps": [step, step]}
    found = figures([new], [old])
    assert found["steps_per_hour"] == 1800 and found["speedup"] == pytest.approx(10.0)
    assert found["steps_per_hour_old_way"] == pytest.approx(180.0) and found["speedup_cpu"] == pytest.approx(10.0)
    assert found["trainer_idle_share"] == pytest.approx(0.5) and found["orchestration_share"] == pytest.approx(0.05)
    assert (found["policy_lag_p50"], found["policy_lag_max"]) == (1.0, 2.0)


def test_an_arm_that_was_measured_is_not_measured_again(tmp_path):
    calls = []
    for _ in range(2):
        kept = KeptArms(tmp_path / "arms.json")
        assert kept.once("a", lambda: calls.append("a") or {"x": 1}) == {"x": 1}
    assert calls == ["a"]
    assert KeptArms(tmp_path / "arms.json").once("b", lambda: 2) == 2


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


async def _played(tokens: Tokens, positions: Any, in_flight: bool, snapshots: bool = True) -> tuple[list[Row], Table]:
    way = replace(NEW, in_flight=in_flight, snapshots=snapshots)
    game = Table(way=way, engine=Scripted(), codec=tokens.codec, clock=StageClock())  # type: ignore[arg-type]
    start = Start(number=3, snapshot=positions[0], power="FRANCE")
    return await game.roll_out(start, seed=1, forks=3, years=1), game


def test_in_lock_step_and_in_flight_the_same_games_are_played(tokens, positions):
    import asyncio

    (one, _), (other, _) = (asyncio.run(_played(tokens, positions, in_flight)) for in_flight in (True, False))
    key = lambda row: (row.fork, row.ply)  # noqa: E731
    assert [row.orders for row in sorted(one, key=key)] == [row.orders for row in sorted(other, key=key)]
    assert one and all(row.after is not None and row.until is not None for row in one)


def test_a_warm_up_draws_for_every_seat_and_keeps_none_of_it(tokens, positions):
    import asyncio

    rows, game = asyncio.run(_played(tokens, positions, in_flight=True, snapshots=False))
    phases = warm_up_phases(1, 3)
    assert phases > 0 and game.counts.warm_up_decisions > phases
    asked = game.engine.asked  # type: ignore[attr-defined]  # it is scripted
    assert len(asked) == game.counts.warm_up_decisions + len(rows)
