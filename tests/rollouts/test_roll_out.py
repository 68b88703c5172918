"""Rollouts are whole, complete, repeatable, and what their rows say of rewards adds up."""

import asyncio
import gc
import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from entente.game.adjudicator import Adjudicator
from entente.game.board import POWERS, Board
from entente.game.scores import components, compute_power_scores
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer
from entente.records.rows import Generation, GenerationRequest, PlayedPhase
from entente.rollouts.fork import PlayedFork
from entente.rollouts.groups import decisions_of, phases_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import EngineError, VersionGoneError
from storage.arrow_files import COMPONENTS, to_table


def play(engine, tokens, positions, *, seed: int = 0, powers: str = "one", **given) -> list[PlayedFork]:
    settings = RolloutSettings(
        start_groups=len(positions),
        policy_powers=powers,
        **({"forks_per_group": 4, "horizon_years": 1} | given),
    )
    pairs = [(snapshot, POWERS[index % 7]) for index, snapshot in enumerate(positions)]
    groups = plan_start_groups(pairs, 10, settings)
    return asyncio.run(roll_out(groups, {POLICY: PolicyPlayer(engine, tokens)}, settings, producer="local", seed=seed))


COUNTS = ("units_dislodged", "units_driven_out", "orders_void", "orders_bounced")


@pytest.mark.system
def test_components_over_one_power_of_one_fork_add_up_to_final_minus_start(uniform_engine, tokens, positions):
    """On 200 forks with all seven powers played, against boards replayed from the stored phases."""
    played = play(uniform_engine(), tokens, positions[:5], powers="all", forks_per_group=40)
    assert len(played) == 200
    sums: dict[tuple[int, int, str], np.ndarray] = defaultdict(lambda: np.zeros(len(COMPONENTS)))
    first: dict[tuple[int, int, str], int] = {}
    for row in decisions_of(played):
        assert row.ended == "horizon"
        place = row.start_group, row.fork, row.power
        sums[place] += [getattr(row, name) for name in COMPONENTS]
        first[place] = min(row.phase_index, first.get(place, row.phase_index))
    forks: dict[tuple[int, int], list[PlayedPhase]] = defaultdict(list)
    for phase_row in phases_of(played):
        forks[phase_row.start_group, phase_row.fork].append(phase_row)
    totals: Counter[str] = Counter()
    for (group, fork, power), total in sums.items():
        told = forks[group, fork][first[group, fork, power] :]
        board = Board.restore(_as_snapshot(told[-1], positions[group - 10]))
        board.step(json.loads(told[-1].orders))
        start = compute_power_scores(Board.restore(_as_snapshot(told[0], positions[group - 10])))
        expected = components(start, compute_power_scores(board), power) | _counted(told, power)
        totals += Counter({name: total for name, total in expected.items() if name in COUNTS})
        np.testing.assert_allclose(total, [expected[name] for name in COMPONENTS], atol=1e-6)
    assert len(sums) > 1000 and any(total[0] != 0 for total in sums.values())
    assert min(totals[name] for name in COUNTS) >= 8, "too little happened for the counts to mean anything"


def _counted(phases: list[PlayedPhase], power: str) -> dict[str, float]:
    """The counts of one power from what was stored: whose orders they were, and whose move got where a unit was."""
    counts = dict.fromkeys(COUNTS, 0.0)
    for phase_row in phases:
        orders, results = json.loads(phase_row.orders), json.loads(phase_row.results)
        owner = {" ".join(order.split()[:2]): name for name, own in orders.items() for order in own}
        for unit, marks in results.items():
            if owner.get(unit) == power:
                counts["orders_void"] += "void" in marks
                counts["orders_bounced"] += "bounce" in marks
                counts["units_driven_out"] += phase_row.phase[-1] == "M" and "dislodged" in marks
            if phase_row.phase[-1] == "M" and "dislodged" in marks:
                moves = {order for order in orders.get(power, []) if order.split()[2] == "-"}
                came = {move for move in moves if move.split()[3][:3] == unit[2:5] and not results[" ".join(move.split()[:2])]}
                counts["units_dislodged"] += len(came)
    return counts


def _as_snapshot(phase_row: PlayedPhase, start: Snapshot) -> Snapshot:
    return replace(start, snapshot_id=phase_row.snapshot_id, position=phase_row.position, phase=phase_row.phase)


def test_a_replay_of_the_stored_orders_meets_every_stored_position(uniform_engine, tokens, positions):
    played = play(uniform_engine(), tokens, positions[:3])
    board, fork, ended = None, None, []
    for phase_row in phases_of(played):
        if (phase_row.start_group, phase_row.fork) != fork:
            fork, board = (phase_row.start_group, phase_row.fork), Board.restore(positions[phase_row.start_group - 10])
        assert board is not None and board.snapshot_id == phase_row.snapshot_id
        if not (orders := json.loads(phase_row.orders)):
            ended.append(fork)
            continue
        assert json.loads(phase_row.results) == {unit: list(found) for unit, found in board.step(orders).results.items()}
    assert len(ended) == len(set(ended)) == len(played), "every fork's last phase is where it ended"


def test_rows_are_complete_and_nothing_is_rejected(uniform_engine, tokens, positions):
    played = play(uniform_engine(), tokens, positions, powers="all")
    table = to_table(decisions_of(played))
    assert table.num_rows == len({row.decision_id for row in decisions_of(played)}) > 400
    assert all(column.null_count == 0 for column in table.columns)
    for row in decisions_of(played):
        assert row.orders_rejected == 0 and row.status == "complete"
        assert len(row.legal_offsets) - 1 == len(row.behaviour_logprobs) == len(row.input_ids) - row.prompt_len
        widths = np.diff(row.legal_offsets)
        np.testing.assert_allclose(row.behaviour_logprobs, -np.log(widths), rtol=1e-6)
        assert any(widths > 1), "a forced decision teaches nothing and is not asked for"


def test_scripted_opponents_share_their_random_numbers_within_a_group_and_not_across(uniform_engine, tokens, positions):
    played = play(uniform_engine(), tokens, [positions[0], positions[0]], forks_per_group=3)
    first = [json.loads(phase_row.orders) for phase_row in phases_of(played) if phase_row.phase_index == 0]
    others = [{power: orders for power, orders in phase_row.items() if power not in POWERS[:2]} for phase_row in first]
    assert others[0] == others[1] == others[2] and others[3] == others[4] == others[5]
    assert others[0] != others[3]
    assert len({json.dumps(phase_row[POWERS[0]]) for phase_row in first[:3]}) > 1, "forks must differ in what the policy does"


def test_the_same_seed_repeats_everything_but_the_clock(uniform_engine, tokens, positions):
    def told(played: list[PlayedFork]) -> list:
        clocks = {"queue_ms", "prefill_ms", "decode_ms", "engine_ms"}
        table = to_table(decisions_of(played))
        return table.drop_columns(sorted(clocks | {"checksum"})).to_pylist()

    assert told(play(uniform_engine(), tokens, positions[:3], seed=4)) == told(
        play(uniform_engine(), tokens, positions[:3], seed=4)
    )
    assert told(play(uniform_engine(), tokens, positions[:3], seed=4)) != told(
        play(uniform_engine(), tokens, positions[:3], seed=5)
    )


def test_a_failed_fork_is_data_with_a_reason_and_its_neighbours_go_on(uniform_engine, tokens, positions):
    def fails(request: GenerationRequest) -> bool:
        return request.request_id.startswith("local/0/10/2/1/")  # fork 2 of the first group, at its second phase

    played = play(uniform_engine(fails=fails), tokens, positions[:2])
    bad = [row for row in decisions_of(played) if row.status == "failed"]
    assert sum(fork.status == "failed" for fork in played) == 1 and {(row.start_group, row.fork) for row in bad} == {(10, 2)}
    assert {row.ended for row in bad} == {"failed"}
    assert all("was made to fail" in row.reason for row in bad)
    assert len({row.fork for row in decisions_of(played) if row.status == "complete" and row.start_group == 10}) == 3


def test_too_many_failed_forks_fail_the_task(uniform_engine, tokens, positions):
    with pytest.raises(EngineError, match=r"8 of 8 forks failed; the first: request .* was made to fail"):
        play(uniform_engine(fails=lambda request: True), tokens, positions[:2])


def test_games_end_when_they_are_played_and_wait_for_no_garbage_collection(uniform_engine, tokens, positions):
    """The engine's games are cycles of hundreds of objects, sixty of them a step."""

    def games() -> int:
        return sum(isinstance(each, Adjudicator) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = games()
        play(uniform_engine(), tokens, positions[:2])
        assert games() == before
    finally:
        gc.enable()


def test_forks_advance_independently_with_many_requests_in_flight(uniform_engine, tokens, positions):
    """A fork whose answers never come must not hold the others back."""

    def gone_on(requests: list[GenerationRequest]) -> bool:
        """All seven other forks have asked, and one of them a second time."""
        places = [request.request_id.split("/")[2:5] for request in requests]
        return len({(group, fork) for group, fork, _ in places}) >= 7 and any(phase_row != "0" for _, _, phase_row in places)

    class Stuck(uniform_engine):
        async def generate(self, request):
            if request.request_id.startswith("local/0/10/0/"):
                async with asyncio.timeout(60):
                    while not gone_on(self.requests):
                        await asyncio.sleep(0.01)
            return await super().generate(request)

    engine = Stuck()
    play(engine, tokens, positions[:2])
    order = [request.request_id.split("/")[2:5] for request in engine.requests]
    first_of_slow = order.index(["10", "0", "0"])
    done_before = {tuple(place) for place in order[:first_of_slow]}
    assert {(group, fork) for group, fork, _ in done_before} == {(g, f) for g in ("10", "11") for f in "0123"} - {("10", "0")}
    assert any(phase_row != "0" for _, _, phase_row in done_before)


def test_a_decision_whose_version_was_retired_meanwhile_is_drawn_again_and_never_for_ever(uniform_engine, tokens, positions):
    """The first draws of each request meet a retired version: the same seed under the newest one gives the row."""
    refusals: dict[str, int] = {}

    class Retiring(uniform_engine):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        async def generate(self, request: GenerationRequest) -> Generation:
            if refusals.setdefault(request.request_id, 0) < self.times:
                refusals[request.request_id] += 1
                raise VersionGoneError("policy version 3 was retired while it was being drawn from: ask for 5")
            return await super().generate(request)

    untroubled = play(uniform_engine(), tokens, positions[:2])
    played = play(Retiring(2), tokens, positions[:2])
    assert set(refusals.values()) == {2} and sum(fork.status == "failed" for fork in played) == 0
    assert [row.orders for row in decisions_of(played)] == [row.orders for row in decisions_of(untroubled)]
    refusals.clear()
    with pytest.raises(EngineError, match="version 3 was retired"):
        play(Retiring(1000), tokens, positions[:2])
