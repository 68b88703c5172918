"""Returns and selection, compared with plain loops over the dataclasses."""

import hashlib
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from entente.records.rows import Decision
from storage.arrow_files import COMPONENTS
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import publish_shard

BLEND = {name: 1.0 - 0.375 * place for place, name in enumerate(COMPONENTS)}
BLEND |= {f"final_{name}": 0.25 * place - 1.0 for place, name in enumerate(COMPONENTS)}  # every one with a weight of its own
POWERS = ("FRANCE", "ITALY", "TURKEY")
PHASES = ("S1901M", "F1901M", "F1901R", "W1901A", "S1902M")
Group = tuple[str, int, str, str]
"""Producer, start group, power, phase."""


@dataclass(frozen=True)
class Row:
    producer: str
    decision: Decision


def random_run(paths: RunPaths, rows: Any, seed: int) -> list[Row]:
    """Two producers whose forks skip phases, fail now and then, and mix policy versions."""
    rng = random.Random(seed)
    everything: list[Row] = []
    for producer in ("p0", "p1"):
        first = 0
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(1, 3)
            decisions = []
            for start_group in range(first, first + count):
                version = max(0, (start_group + rng.randint(-2, 1)))
                for fork in range(rng.randint(1, 4)):
                    played = [phase for phase in PHASES if rng.random() < 0.8]  # so a ply is another phase elsewhere
                    for power in rng.sample(POWERS, rng.randint(1, 3)):
                        for ply, phase in enumerate(played):
                            if rng.random() < 0.5:
                                decisions.append(
                                    rows.make_decision(
                                        rng,
                                        producer,
                                        start_group=start_group,
                                        fork=fork,
                                        ply=ply,
                                        power=power,
                                        phase=phase,
                                        policy_version=max(0, version - rng.choice([0, 0, 0, 1])),
                                        status=rng.choice(["complete"] * 15 + ["failed"]),
                                        orders_rejected=rng.choice([0] * 15 + [1]),
                                    )
                                )
            rng.shuffle(decisions)
            publish_shard(paths, producer, first, decisions, [], {}, next_start_group=first + count)
            everything += [Row(producer, decision) for decision in decisions]
            first += count
    return everything


def naive_returns(run: list[Row], blend: dict[str, float], discount: float) -> dict[int, float]:
    returns = {}
    for row in run:
        mine = row.decision
        later = [
            other.decision
            for other in run
            if other.producer == row.producer
            and (other.decision.start_group, other.decision.fork, other.decision.power)
            == (mine.start_group, mine.fork, mine.power)
            and other.decision.ply >= mine.ply
        ]
        later.sort(key=lambda decision: decision.ply)
        returns[mine.decision_id] = sum(
            weight * getattr(decision, name.removeprefix("final_")) * (1.0 if name.startswith("final_") else discount**k)
            for k, decision in enumerate(later)
            for name, weight in blend.items()
        )
    return returns


def uniform(query: SelectionQuery, producer: str, start_group: int) -> float:
    """As the contract says: between 0 and 1, from a hash."""
    told = f"{query.seed}:{query.step}:{producer}:{start_group}"
    return ((int.from_bytes(hashlib.md5(told.encode()).digest()[:8], "little") >> 12) + 0.5) / 2**52


def naive_selection(
    run: list[Row], returns: dict[int, float], uses: Counter[int], query: SelectionQuery
) -> tuple[list[set[int]], dict[str, int]]:
    """Chosen advantage groups in the batch's order, and how many there are of each standing."""
    groups: dict[Group, list[Decision]] = defaultdict(list)
    for row in run:
        groups[row.producer, row.decision.start_group, row.decision.power, row.decision.phase].append(row.decision)
    standing: dict[Group, str] = {}
    lag: dict[Group, int] = {}
    for group, members in groups.items():
        versions = [member.policy_version for member in members]
        values = [returns[member.decision_id] for member in members]
        lag[group] = query.policy_version - min(versions)
        if min(uses[member.decision_id] for member in members) >= query.max_uses:
            standing[group] = "used"
        elif len(members) < 2 or any(member.status != "complete" or member.orders_rejected for member in members):
            standing[group] = "unusable"
        elif max(versions) > query.policy_version:
            standing[group] = "ahead"
        elif lag[group] > query.max_policy_lag:
            standing[group] = "expired"
        elif max(values) - min(values) <= 1e-6:
            standing[group] = "no_spread"
        else:
            standing[group] = "eligible"
    fresh = {group for group in groups if 0 <= lag[group] <= query.max_policy_lag}
    eligible = {group for group in groups if standing[group] == "eligible"}
    starts = {group[:2] for group in eligible}
    pools: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for producer, number in starts:
        played = {power for p, n, power, _ in fresh if (p, n) == (producer, number)}
        age = max(lag[group] for group in eligible if group[:2] == (producer, number))
        key = -math.log(uniform(query, producer, number)) / 0.5**age
        pools[played.pop() if len(played) == 1 else ""].append((key, producer, number))
    drawn = sorted((turn, *each) for pool in pools.values() for turn, each in enumerate(sorted(pool)))[: query.start_groups]
    place = {(producer, number): at for at, (_, _, producer, number) in enumerate(drawn)}
    chosen = [group for group in eligible if group[:2] in place]
    chosen.sort(key=lambda group: (place[group[:2]], *group[2:]))
    return [{member.decision_id for member in groups[group]} for group in chosen], Counter(standing.values())


@pytest.mark.parametrize(("seed", "discount"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_returns_equal_a_plain_loop(paths: RunPaths, rows: Any, seed: int, discount: float) -> None:
    run = random_run(paths, rows, seed)
    index = open_index(paths, blend=BLEND, discount=discount)
    found = dict(index.connection.sql('SELECT decision_id, "return" FROM decisions').fetchall())
    assert found == pytest.approx(naive_returns(run, BLEND, discount), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_steps_choose_what_a_plain_loop_chooses_and_use_no_row_too_often(paths: RunPaths, rows: Any, seed: int) -> None:
    run = random_run(paths, rows, seed)
    returns = naive_returns(run, {"centres_gained": 1.0}, 1.0)
    index = Index(paths)
    uses: Counter[int] = Counter()
    index.refresh()
    for step in range(1, 6):
        index.refresh()
        asked = query(
            step,
            policy_version=step - 1,
            max_policy_lag=seed % 4,
            start_groups=1 + seed % 3,
            seed=seed,
            max_uses=1 + seed % 2,
        )
        selection = index.select_batch(asked)
        expected, counts = naive_selection(run, returns, uses, asked)
        found: dict[int, set[int]] = defaultdict(set)
        for row in selection.rows.to_pylist():
            found[row["advantage_group"]].add(row["decision_id"])
            assert row["return"] == pytest.approx(returns[row["decision_id"]])
            assert row["policy_lag"] == step - 1 - row["policy_version"] <= asked.max_policy_lag
        assert {name: count for name, count in selection.counts.items() if count and name not in ("chosen", "waiting")} == counts
        assert sorted(found) == list(range(len(found))), "advantage groups are numbered from 0 without gaps"
        assert selection.counts["chosen"] == len(found) == counts["eligible"] - selection.counts["waiting"]
        assert [found[number] for number in sorted(found)] == expected
        uses.update(selection.rows["decision_id"].to_pylist())
        assert write_ledger(paths, step, selection.rows, {})
        assert max(uses.values(), default=0) <= asked.max_uses


def query(step: int, **given: Any) -> SelectionQuery:
    asked: dict[str, Any] = {"policy_version": 0, "max_policy_lag": 2, "start_groups": 4, "seed": 0} | given
    return SelectionQuery(step=step, **asked)


def test_two_fresh_indexes_choose_the_same_rows_in_the_same_order(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(5)
    for producer in ("p1", "p0"):
        decisions, plies = rows.make_shard_rows(rng, range(3), producer, forks=6)
        publish_shard(paths, producer, 0, decisions, plies, {})
    late = Index(paths)
    late.connection.execute("SET threads = 1")
    found = []
    for index in (Index(paths), late):
        index.refresh()
        found.append(index.select_batch(query(3, max_policy_lag=3)).rows)
    assert found[0].num_rows > 10
    assert found[0].equals(found[1])


def one_power_runs(paths: RunPaths, rows: Any, played: dict[int, tuple[str, int]]) -> Index:
    """A start group of each number, in which one power plays under one version."""
    rng = random.Random(3)
    for number, (power, version) in played.items():
        decisions = [
            rows.make_decision(
                rng, start_group=number, fork=fork, power=power, policy_version=version, centres_gained=float(fork)
            )
            for fork in range(3)
        ]
        publish_shard(paths, "p0", number, decisions, [], {})
    index = open_index(paths)
    return index


def test_a_return_that_is_not_a_number_is_never_trained_on(paths: RunPaths, rows: Any) -> None:
    decisions = [
        rows.make_decision(random.Random(fork), fork=fork, centres_gained=gained)
        for fork, gained in enumerate([1.0, float("nan"), 0.0])
    ]
    publish_shard(paths, "p0", 0, decisions, [], {})
    index = open_index(paths)
    assert index.select_batch(query(1)).counts["unusable"] == 1
