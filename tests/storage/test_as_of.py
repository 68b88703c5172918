"""What a past step was chosen from, asked much later, is what its trainer saw then, group by group."""

import random
from collections import Counter
from typing import Any

import pytest

from records.rows import Decision
from storage.as_of import read_past_choice
from storage.asking import connect
from storage.index import Index
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import publish_shard
from telemetry.errors import InputError

Group = tuple[str, int, str, str]
LAG = 2


def standing_by_hand(
    published: list[tuple[str, Decision]], used: Counter[Group], version: int, max_uses: int
) -> dict[Group, str]:
    """The standing of every advantage group, by a plain loop over what had been published."""
    groups: dict[Group, list[Decision]] = {}
    for producer, row in published:
        groups.setdefault((producer, row.start_group, row.power, row.phase), []).append(row)
    later: dict[tuple[str, int, int, str], list[Decision]] = {}
    for producer, row in published:
        later.setdefault((producer, row.start_group, row.fork, row.power), []).append(row)
    found = {}
    for group, members in groups.items():
        returns = [
            sum(other.centres_gained for other in later[group[0], row.start_group, row.fork, row.power] if other.ply >= row.ply)
            for row in members
        ]
        oldest = min(row.policy_version for row in members)
        if used[group] >= max_uses:
            found[group] = "used"
        elif len(members) < 2:
            found[group] = "unusable"
        elif max(row.policy_version for row in members) > version:
            found[group] = "ahead"
        elif version - oldest > LAG:
            found[group] = "expired"
        else:
            found[group] = "eligible" if max(returns) - min(returns) > 1e-6 else "no_spread"
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.system)])
def test_every_step_asked_later_shows_what_was_eligible_then(paths: RunPaths, rows: Any, seed: int) -> None:
    rng, max_uses = random.Random(seed), 1 + seed % 2
    published: list[tuple[str, Decision]] = []
    used: Counter[Group] = Counter()
    expected: dict[int, dict[Group, str]] = {}
    chosen: dict[int, list[int]] = {}
    nexts, trainer = {"p0": 0, "p1": 0}, Index(paths)
    for step in range(1, 7):
        for _ in range(rng.randint(0, 3)):
            producer = rng.choice(["p0", "p1"])
            number = nexts[producer]
            nexts[producer] += rng.choice([1, 1, 2])  # a gap now and then
            version = max(0, step - 1 - rng.choice([0, 0, 1, 3]))
            some, plies = rows.make_shard_rows(rng, range(number, number + 1), producer, forks=3, policy_version=version)
            publish_shard(paths, producer, number, some, plies, {})
            published += [(producer, row) for row in some]
        trainer.refresh()
        choice = trainer.select_batch(
            SelectionQuery(
                step=step,
                policy_version=step - 1,
                max_policy_lag=LAG,
                start_groups=2,
                seed=seed,
                max_uses=max_uses,
            )
        )
        expected[step] = standing_by_hand(published, used, step - 1, max_uses)
        chosen[step] = choice.rows["decision_id"].to_pylist()
        told = {"selection": choice.query.to_json(), "shards": choice.shards}
        assert write_ledger(paths, step, choice.rows, told)
        for group in {(r["shard"].split("/")[0], r["start_group"], r["power"], r["phase"]) for r in choice.rows.to_pylist()}:
            used[group] += 1
    for step in (2, 4, 6):
        then = read_past_choice(paths, step)
        index = then.open(paths)
        again = index.select_batch(then.query)
        found = index.fetch("SELECT producer, start_group, power, phase, standing FROM standings")
        assert {tuple(row[:4]): row[4] for row in found} == expected[step]
        assert again.rows["decision_id"].to_pylist() == chosen[step], "and the choice is the same"
        with connect(paths.root, as_of=step) as asked:
            assert dict(asked.sql("select standing, count(*) from standings group by all").fetchall()) == Counter(
                expected[step].values()
            )
            (tokens,) = asked.sql("select count(distinct decision_id) from tokens").fetchall()[0]
            (decisions,) = asked.sql("select count(*) from decisions").fetchall()[0]
            assert tokens == decisions == sum(1 for p, r in published if (p, r.start_group, r.power, r.phase) in expected[step])
            assert asked.sql("select count(*) from batches where step >= ?", params=[step]).fetchall() == [(0,)]


def test_a_step_that_never_was_or_does_not_tell_is_refused(paths: RunPaths) -> None:
    with pytest.raises(InputError, match="step 3 never was: run 'a' has none yet"):
        read_past_choice(paths, 3)
    assert write_ledger(paths, 1, ROWS_SCHEMA.empty_table(), {})
    with pytest.raises(InputError, match="step 3 never was: run 'a' has steps 1 to 1"):
        read_past_choice(paths, 3)
    with pytest.raises(InputError, match="does not say what its rows were chosen from"):
        read_past_choice(paths, 1)
