"""Returns and selection, compared with plain loops over the dataclasses; and a user's own SQL in place of the draw."""

import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from entente.records.rows import Decision
from entente.telemetry.errors import InputError
from storage.arrow_files import COMPONENTS
from storage.index import Index, check_selection, open_index
from storage.ledger import read_ledger, write_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard

BLEND = {name: 1.0 - 0.375 * place for place, name in enumerate(COMPONENTS)}
BLEND |= {f"final_{name}": 0.25 * place - 1.0 for place, name in enumerate(COMPONENTS)}  # every one with a weight of its own
POWERS = ("FRANCE", "ITALY", "TURKEY")
PHASES = ("S1901M", "F1901M", "F1901R", "W1901A", "S1902M")
TEACHING = ("used", "zero_std", "eligible")
"""Eligibilities of groups that a step could train on, has trained on, or could if their returns differed."""
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
                    played = [phase for phase in PHASES if rng.random() < 0.8]  # so a phase is another phase elsewhere
                    for power in rng.sample(POWERS, rng.randint(1, 3)):
                        for phase_index, phase in enumerate(played):
                            if rng.random() < 0.5:
                                decisions.append(
                                    rows.make_decision(
                                        rng,
                                        producer,
                                        start_group=start_group,
                                        fork=fork,
                                        phase_index=phase_index,
                                        power=power,
                                        phase=phase,
                                        policy_version=max(0, version - rng.choice([0, 0, 0, 1])),
                                        status=rng.choice(["complete"] * 15 + ["failed"]),
                                        orders_rejected=rng.choice([0] * 15 + [1]),
                                        ended=rng.choice(["horizon", "won", "eliminated"]),
                                    )
                                )
            rng.shuffle(decisions)
            publish_shard(paths, producer, first, decisions, [], {}, next_start_group=first + count)
            everything += [Row(producer, decision) for decision in decisions]
            first += count
    return everything


def naive_returns(run: list[Row], reward_weights: dict[str, float], discount: float) -> dict[int, float]:
    returns = {}
    for row in run:
        mine = row.decision
        later = [
            other.decision
            for other in run
            if other.producer == row.producer
            and (other.decision.start_group, other.decision.fork, other.decision.power)
            == (mine.start_group, mine.fork, mine.power)
            and other.decision.phase_index >= mine.phase_index
        ]
        later.sort(key=lambda decision: decision.phase_index)
        returns[mine.decision_id] = sum(
            weight * getattr(decision, name.removeprefix("final_")) * (1.0 if name.startswith("final_") else discount**k)
            for k, decision in enumerate(later)
            for name, weight in reward_weights.items()
        )
    return returns


def uniform(seed: int, step: int, producer: str, start_group: int) -> float:
    """As the contract says: between 0 and 1, from a hash."""
    told = f"{seed}:{step}:{producer}:{start_group}"
    return ((int.from_bytes(hashlib.md5(told.encode()).digest()[:8], "little") >> 12) + 0.5) / 2**52


def naive_selection(
    run: list[Row],
    returns: dict[int, float],
    uses: Counter[int],
    storage: StorageSettings,
    *,
    seed: int,
    step: int,
    start_groups: int,
) -> tuple[list[set[int]], dict[str, int]]:
    """Chosen advantage groups in the batch's order, and how many there are of each eligibility."""
    groups: dict[Group, list[Decision]] = defaultdict(list)
    for row in run:
        groups[row.producer, row.decision.start_group, row.decision.power, row.decision.phase].append(row.decision)
    eligibility: dict[Group, str] = {}
    lag: dict[Group, int] = {}
    for group, members in groups.items():
        versions = [member.policy_version for member in members]
        values = [returns[member.decision_id] for member in members]
        lag[group] = step - 1 - min(versions)
        if min(uses[member.decision_id] for member in members) >= storage.max_uses:
            eligibility[group] = "used"
        elif len(members) < 2 or any(member.status != "complete" or member.orders_rejected for member in members):
            eligibility[group] = "unusable"
        elif max(versions) > step - 1:
            eligibility[group] = "ahead"
        elif lag[group] > storage.max_policy_lag:
            eligibility[group] = "used" if uses[members[0].decision_id] else "expired"
        elif max(values) - min(values) <= 1e-6:
            eligibility[group] = "zero_std"
        else:
            eligibility[group] = "eligible"
    fresh = {group for group in groups if 0 <= lag[group] <= storage.max_policy_lag}
    eligible = {group for group in groups if eligibility[group] == "eligible"}
    starts = {group[:2] for group in eligible}
    pools: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for producer, number in starts:
        played = {power for p, n, power, _ in fresh if (p, n) == (producer, number)}
        age = max(lag[group] for group in eligible if group[:2] == (producer, number))
        key = -math.log(uniform(seed, step, producer, number)) / 0.5**age
        pools[played.pop() if len(played) == 1 else ""].append((key, producer, number))
    sampled = sorted((turn, *each) for pool in pools.values() for turn, each in enumerate(sorted(pool)))[:start_groups]
    place = {(producer, number): at for at, (_, _, producer, number) in enumerate(sampled)}
    chosen = [group for group in eligible if group[:2] in place]
    chosen.sort(key=lambda group: (place[group[:2]], *group[2:]))
    counts = Counter(eligibility.values())
    counts.update("in_budget" for group in groups if lag[group] <= storage.max_policy_lag and eligibility[group] in TEACHING)
    return [{member.decision_id for member in groups[group]} for group in chosen], counts


@pytest.mark.parametrize(("seed", "discount"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_returns_equal_a_plain_loop(paths: RunPaths, rows: Any, seed: int, discount: float) -> None:
    run = random_run(paths, rows, seed)
    index = open_index(paths, StorageSettings(reward_weights=BLEND, discount=discount))
    found = dict(index.connection.sql('SELECT decision_id, "return" FROM decisions').fetchall())
    assert found == pytest.approx(naive_returns(run, BLEND, discount), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_steps_choose_what_a_plain_loop_chooses_and_use_no_row_too_often(paths: RunPaths, rows: Any, seed: int) -> None:
    run = random_run(paths, rows, seed)
    returns = naive_returns(run, {"centres_gained": 1.0}, 1.0)
    storage = StorageSettings(max_policy_lag=seed % 4, max_uses=1 + seed % 2)
    index = Index(paths, storage, seed=seed)
    uses: Counter[int] = Counter()
    for step in range(1, 6):
        index.refresh()
        rows_chosen, told = index.select_batch(step, policy_version=step - 1, start_groups=1 + seed % 3)
        asked = {"seed": seed, "step": step, "start_groups": 1 + seed % 3}
        expected, counts = naive_selection(run, returns, uses, storage, **asked)
        found: dict[int, set[int]] = defaultdict(set)
        for row in rows_chosen.to_pylist():
            found[row["advantage_group"]].add(row["decision_id"])
            assert row["return"] == pytest.approx(returns[row["decision_id"]])
            assert row["policy_lag"] == step - 1 - row["policy_version"] <= storage.max_policy_lag
        assert {name: count for name, count in told.items() if count and name not in ("chosen", "waiting")} == counts
        assert sorted(found) == list(range(len(found))), "advantage groups are numbered from 0 without gaps"
        assert told["chosen"] == len(found) == counts["eligible"] - told["waiting"]
        assert [found[number] for number in sorted(found)] == expected
        uses.update(rows_chosen["decision_id"].to_pylist())
        assert write_ledger(paths, step, rows_chosen, {})
        assert max(uses.values(), default=0) <= storage.max_uses


def test_two_fresh_indexes_choose_the_same_rows_in_the_same_order(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(5)
    for producer in ("p1", "p0"):
        decisions, phases = rows.make_shard_rows(rng, range(3), producer, forks=6)
        publish_shard(paths, producer, 0, decisions, phases, {})
    found = [open_index(paths, threads=threads).select_batch(3, policy_version=0, start_groups=4)[0] for threads in (1, 4)]
    assert found[0].num_rows > 10
    assert found[0].equals(found[1])


def test_a_return_that_is_not_a_number_is_never_trained_on(paths: RunPaths, rows: Any) -> None:
    decisions = [
        rows.make_decision(random.Random(fork), fork=fork, centres_gained=gained)
        for fork, gained in enumerate([1.0, float("nan"), 0.0])
    ]
    publish_shard(paths, "p0", 0, decisions, [], {})
    assert open_index(paths).select_batch(1, policy_version=0, start_groups=4)[1]["unusable"] == 1


# -- a user's own SQL -----------------------------------------------------------------------------------------------------

DRAW = """
WITH keyed AS (SELECT *, ln(-ln(uniform)) - lag * ln(0.5) AS draw_key FROM candidates)
SELECT shard, start_group FROM keyed
ORDER BY row_number() OVER (PARTITION BY power ORDER BY draw_key, producer, start_group), draw_key, producer, start_group
"""
FIRST = "FROM candidates SELECT shard, start_group ORDER BY start_group"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_draw_written_as_sql_chooses_the_rows_of_the_draw(paths: RunPaths, rows: Any, seed: int) -> None:
    random_run(paths, rows, seed)
    ours, theirs = (
        Index(paths, StorageSettings(max_policy_lag=1 + seed % 3, selection=selection), seed=seed) for selection in ("", DRAW)
    )
    taken = 0
    for step in range(1, 4):
        ours.refresh()
        theirs.refresh()
        asked: dict[str, Any] = {"step": step, "policy_version": step - 1}
        assert theirs.eligible(**asked) == ours.eligible(**asked)
        sampled, counts = ours.select_batch(**asked, start_groups=1 + seed % 3)
        found, seen = theirs.select_batch(**asked, start_groups=1 + seed % 3)
        assert found.equals(sampled) and seen == counts
        taken += sampled.num_rows
        assert write_ledger(paths, step, sampled, {})
    assert taken > 0


@pytest.fixture
def groups(paths: RunPaths, rows: Any) -> RunPaths:
    """Start groups 0 to 11 of one power; number n is of policy version n % 6."""
    rng = random.Random(3)
    for number in range(12):
        given = {"start_group": number, "policy_version": number % 6}
        decisions = [rows.make_decision(rng, **given, fork=fork, centres_gained=float(fork)) for fork in range(3)]
        publish_shard(paths, "p0", number, decisions, [], {})
    return paths


def chosen(paths: RunPaths, selection: str, start_groups: int = 3, lag: int = 2) -> list[int]:
    """Start groups that step 6 takes, in its order."""
    index = open_index(paths, StorageSettings(max_policy_lag=lag, selection=selection))
    rows, _ = index.select_batch(6, policy_version=5, start_groups=start_groups)
    return list(dict.fromkeys(rows["start_group"].to_pylist()))


def test_the_order_is_the_sql_s_and_the_quota_and_the_lag_are_the_step_s(groups: RunPaths) -> None:
    assert chosen(groups, f"{FIRST} DESC") == [11, 10, 9]
    assert chosen(groups, f"{FIRST} DESC", start_groups=99, lag=1) == [11, 10, 5, 4]
    assert chosen(groups, "FROM candidates SELECT shard, start_group WHERE lag = 0 ORDER BY start_group") == [5, 11]
    joined = "FROM candidates JOIN decisions USING (shard, start_group) SELECT shard, start_group"
    assert chosen(groups, f"{joined} GROUP BY ALL ORDER BY max(decisions.policy_version), start_group") == [3, 9, 4]


def test_sql_that_returns_no_start_group_is_named_where_there_are_some(
    groups: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(groups, "FROM candidates SELECT shard, start_group WHERE lag > 9") == []
    assert "storage.selection returns none" in caplog.text


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        pytest.param("SELECT 'p0/000009.arrow' AS shard, 99 AS start_group", "start group 99", id="unknown"),
        pytest.param("SELECT 'p0/000000.arrow' AS shard, 0 AS start_group", "cannot train on it", id="expired"),
        pytest.param("SELECT [NULL] AS shard, 3.5 AS start_group", "start group 3.5", id="other types"),
        pytest.param(f"({FIRST}) UNION ALL ({FIRST})", "twice", id="twice"),
        pytest.param("FROM candidates SELECT shard, start_group, power", "returns shard, start_group, power", id="columns"),
        pytest.param("DELETE FROM decisions", "end it with a SELECT", id="no answer"),
        pytest.param("-- nothing", "end it with a SELECT", id="nothing"),
        pytest.param(f"{FIRST}, missing", "missing.*; `candidates` has shard, start_group, producer", id="no such column"),
        pytest.param("FROM candidates SELECT shard, start_group WHERE error('boom') IS NULL", "failed: .*boom", id="error"),
        pytest.param("SELEC", "failed: Parser Error", id="no SQL"),
    ],
)
def test_sql_that_breaks_a_rule_is_refused_in_a_sentence(groups: RunPaths, selection: str, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^storage\.selection .*{sentence}") as refused:
        chosen(groups, selection)
    assert "\n" not in str(refused.value)


def test_a_file_is_kept_as_its_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.sql"
    file.write_text(f"-- mine.sql\n{FIRST};")
    settings = StorageSettings(selection=str(file))
    file.unlink()
    assert settings.selection == f"-- mine.sql\n{FIRST};\n" and StorageSettings.model_validate(settings.model_dump()) == settings
    check_selection(settings)
    with pytest.raises(InputError, match=r"query '.*mine\.sql' cannot be read: No such file"):
        StorageSettings(selection=str(file))


def test_a_ledger_says_what_its_rows_were_chosen_by(groups: RunPaths) -> None:
    rows, _ = open_index(groups, StorageSettings(max_uses=2, selection=FIRST), seed=7).select_batch(
        6, policy_version=5, start_groups=3
    )
    assert write_ledger(groups, 6, rows, {"policy_version": "5"})
    recorded = read_ledger(groups, 6)
    assert recorded is not None
    asked = {"step": 6, "policy_version": 5, "start_groups": 3, "seed": 7, "max_policy_lag": 2, "max_uses": 2}
    assert json.loads(recorded.schema.metadata[b"selection"]) == asked | {"selection": FIRST}
    assert {b"select_batch.sql", b"duckdb"} <= recorded.schema.metadata.keys()
