"""Returns and selection, compared with plain loops over the dataclasses."""

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from storage.index import Index, SelectionQuery
from storage.ledger import write_ledger
from storage.runs import RunPaths
from storage.schema import COMPONENTS, Decision
from storage.shards import publish_shard

BLEND = {name: 1.0 - 0.375 * place for place, name in enumerate(COMPONENTS)}
BLEND |= {f"final_{name}": 0.25 * place - 1.0 for place, name in enumerate(COMPONENTS)}  # every one with a weight of its own
POWERS = ("FRANCE", "ITALY", "TURKEY")
PHASES = ("S1901M", "F1901M", "F1901R", "W1901A", "S1902M")


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


def naive_selection(
    run: list[Row], returns: dict[int, float], used: set[int], query: SelectionQuery
) -> tuple[list[set[int]], dict[str, int]]:
    """Chosen advantage groups, and the standing of all; of two producers that tie, p0 comes first here."""
    groups: dict[tuple[str, int, str, str], list[Decision]] = defaultdict(list)
    for row in run:
        groups[row.producer, row.decision.start_group, row.decision.power, row.decision.phase].append(row.decision)
    counts: dict[str, int] = defaultdict(int)
    eligible: dict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for (producer, start_group, power, phase), members in groups.items():
        versions = [member.policy_version for member in members]
        values = [returns[member.decision_id] for member in members]
        if any(member.decision_id in used for member in members):
            counts["used"] += 1
        elif len(members) < 2 or any(member.status != "complete" or member.orders_rejected for member in members):
            counts["unusable"] += 1
        elif max(versions) > query.policy_version:
            counts["ahead"] += 1
        elif query.policy_version - min(versions) > query.max_policy_lag:
            counts["expired"] += 1
        elif len(set(values)) == 1:
            counts["no_spread"] += 1
        else:
            counts["eligible"] += 1
            eligible[producer, start_group].append((power, phase))

    def oldest(place: tuple[str, int]) -> int:
        return min(member.policy_version for kind in eligible[place] for member in groups[(*place, *kind)])

    order = sorted(eligible, key=lambda place: (-oldest(place), place[1], place[0]))
    chosen = [(*place, *kind) for place in order[: query.start_groups] for kind in sorted(eligible[place])]
    return [{member.decision_id for member in groups[group]} for group in chosen], counts


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_returns_equal_a_plain_loop(paths: RunPaths, rows: Any, seed: int, discount: float) -> None:
    run = random_run(paths, rows, seed)
    index = Index(paths, blend=BLEND, discount=discount)
    index.refresh()
    found = dict(index.connection.sql('SELECT decision_id, "return" FROM decisions').fetchall())
    assert found == pytest.approx(naive_returns(run, BLEND, discount), abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_steps_choose_what_a_plain_loop_chooses_and_use_no_row_twice(paths: RunPaths, rows: Any, seed: int) -> None:
    run = random_run(paths, rows, seed)
    returns = naive_returns(run, {"centres_gained": 1.0}, 1.0)
    index = Index(paths)
    used: set[int] = set()
    trained: list[int] = []
    index.refresh()
    taken_elsewhere = index.select_batch(query(1, policy_version=9, max_policy_lag=9, start_groups=99)).rows
    assert write_ledger(paths, "other", 1, taken_elsewhere, {})
    for step in range(1, 7):
        index.refresh()
        asked = query(step, policy_version=step - 1, max_policy_lag=seed % 4, start_groups=1 + seed % 3)
        selection = index.select_batch(asked)
        expected, counts = naive_selection(run, returns, used, asked)
        found: dict[int, set[int]] = defaultdict(set)
        for row in selection.rows.to_pylist():
            found[row["advantage_group"]].add(row["decision_id"])
            assert row["return"] == pytest.approx(returns[row["decision_id"]])
            assert row["policy_lag"] == step - 1 - row["policy_version"] <= asked.max_policy_lag
        assert {name: count for name, count in selection.counts.items() if count and name not in ("chosen", "waiting")} == counts
        assert sorted(found) == list(range(len(found))), "advantage groups are numbered from 0 without gaps"
        assert selection.counts["chosen"] == len(found) == counts["eligible"] - selection.counts["waiting"]
        if not _tie_at_the_edge(run, returns, used, asked):
            assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected))
        trained += selection.rows["decision_id"].to_pylist()
        used.update(trained)
        assert write_ledger(paths, "main", step, selection.rows, {})
    assert len(trained) == len(set(trained))


def _tie_at_the_edge(run: list[Row], returns: dict[int, float], used: set[int], asked: SelectionQuery) -> bool:
    """True where the seeded order of two producers decides who is in."""
    turned = [Row({"p0": "p1", "p1": "p0"}[row.producer], row.decision) for row in run]
    one, other = (naive_selection(rows, returns, used, asked)[0] for rows in (run, turned))
    return sorted(map(sorted, one)) != sorted(map(sorted, other))


def query(step: int, **given: int) -> SelectionQuery:
    asked = {"policy_version": 0, "max_policy_lag": 2, "start_groups": 4, "seed": 0} | given
    return SelectionQuery(step=step, lineage="main", **asked)


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


def test_an_index_that_grew_with_the_run_chooses_like_a_fresh_one(paths: RunPaths, rows: Any) -> None:
    grown = Index(paths)
    grown.refresh()
    rng = random.Random(3)
    for first in (2, 0, 1):
        decisions, plies = rows.make_shard_rows(rng, range(first, first + 1), forks=6)
        publish_shard(paths, "p0", first, decisions, plies, {})
        assert grown.refresh() == len(decisions)
    fresh = Index(paths)
    fresh.refresh()
    assert grown.select_batch(query(1)).rows.equals(fresh.select_batch(query(1)).rows)


def test_only_ties_depend_on_the_seed(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(3)
    for producer in ("p0", "p1"):
        decisions, plies = rows.make_shard_rows(rng, range(2), producer, forks=6)
        publish_shard(paths, producer, 0, decisions, plies, {})
    index = Index(paths)
    index.refresh()
    firsts = {index.select_batch(query(1, start_groups=1, seed=seed)).rows["shard"][0].as_py() for seed in range(20)}
    assert firsts == {"p0/000000.arrow", "p1/000000.arrow"}
    for seed in range(5):
        groups = index.select_batch(query(1, start_groups=2, seed=seed)).rows["start_group"].to_pylist()
        assert set(groups) == {0}, "the lower number comes before any tie is broken"


def test_fresher_start_groups_come_first(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(3)
    for first, version in ((0, 3), (1, 5), (2, 4)):
        decisions, plies = rows.make_shard_rows(rng, range(first, first + 1), forks=8, policy_version=version)
        publish_shard(paths, "p0", first, decisions, plies, {})
    index = Index(paths)
    index.refresh()
    rows_chosen = index.select_batch(query(6, policy_version=5, start_groups=2)).rows
    assert list(dict.fromkeys(rows_chosen["start_group"].to_pylist())) == [1, 2]


def test_a_return_that_is_not_a_number_is_never_trained_on(paths: RunPaths, rows: Any) -> None:
    decisions = [
        rows.make_decision(random.Random(fork), fork=fork, centres_gained=gained)
        for fork, gained in enumerate([1.0, float("nan"), 0.0])
    ]
    publish_shard(paths, "p0", 0, decisions, [], {})
    index = Index(paths)
    index.refresh()
    assert index.select_batch(query(1)).counts["unusable"] == 1
