"""Advantage groups are made of what was known before a decision: no outcome can part two decisions that faced the same choice.

Grouping by what a decision led to would compare winners with winners, and whatever made them win would teach nothing.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from entente.records.rows import Decision
from storage.arrow_files import COMPONENTS
from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import publish_shard


def decisions_of(rows: Any) -> list[Decision]:
    """Three forks of three start groups; two powers, two phases; the second fork skips a phase, so its plies are others."""
    rng, made = random.Random(1), []
    for start_group in range(3):
        for fork in range(4):
            phases = ["S1901M", "F1901M"] if fork == 1 else ["S1901M", "F1901R", "F1901M"]
            for ply, phase in enumerate(phases):
                for power in ("FRANCE", "TURKEY"):
                    made.append(rows.make_decision(rng, start_group=start_group, fork=fork, ply=ply, phase=phase, power=power))
    return made


def with_other_outcomes(decisions: list[Decision], seed: int) -> list[Decision]:
    """The same choices, answered and ended in another way, so that every group has spread."""
    rng, changed = random.Random(seed), []
    for decision in decisions:
        outcome: dict[str, Any] = {name: float(rng.randrange(-40, 40)) / 8 for name in COMPONENTS}
        outcome |= {"ended": rng.choice(["horizon", "won", "eliminated", "settled"]), "policy_version": rng.randrange(2)}
        outcome |= {
            "orders": [rng.choice(["A PAR H", "A PAR - BUR"])],
            "behaviour_logprobs": [-rng.random() for _ in decision.behaviour_logprobs],
        }
        changed.append(replace(decision, **outcome))
    return changed


def groups_of(folder: Path, decisions: list[Decision]) -> set[frozenset[int]]:
    """The decisions that a step would compare with one another."""
    paths = RunPaths(folder).create()
    publish_shard(paths, "p0", 0, decisions, [], {}, next_start_group=3)
    index = open_index(paths)
    rows, _ = index.select_batch(1, policy_version=1, start_groups=9)
    groups: dict[int, set[int]] = {}
    for row in rows.to_pylist():
        groups.setdefault(row["advantage_group"], set()).add(row["decision_id"])
    return {frozenset(members) for members in groups.values()}


def outcomes_part_them(folder: Path, rows: Any) -> bool:
    """Whether decisions are grouped otherwise once their outcomes are others."""
    decisions = decisions_of(rows)
    found = [groups_of(folder / str(seed), with_other_outcomes(decisions, seed)) for seed in range(3)]
    assert all(found), "nothing was chosen, so nothing was seen"
    return any(groups != found[0] for groups in found)


def test_a_group_is_one_snapshot_one_power_and_one_phase_name(tmp_path: Path, rows: Any) -> None:
    decisions = with_other_outcomes(decisions_of(rows), 0)
    expected: dict[tuple[str, str, str], set[int]] = {}
    for decision in decisions:
        expected.setdefault((decision.snapshot_id, decision.power, decision.phase), set()).add(decision.decision_id)
    assert groups_of(tmp_path / "run", decisions) == {frozenset(members) for members in expected.values()}


def test_no_outcome_parts_a_group(tmp_path: Path, rows: Any) -> None:
    assert not outcomes_part_them(tmp_path, rows)
