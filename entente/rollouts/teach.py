"""Search as a teacher: labels positions that the student reaches, and makes distillation targets of the answers.

The student's games are start groups with one fork each, under a producer of the round; so an advantage group has one decision,
and no step selects these rows. The distillation targets of a shard of visits are one file with the same number, so a retried task
does not repeat it. The engine's event loop samples proposals; worker processes run their playouts on all cores.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from entente.game.board import Board
from entente.game.snapshot import Snapshot, make_snapshot
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.search import propose, search_apart, search_seed_name
from entente.players.seeds import seed_of
from entente.records.distil_target import DistilTarget, distil_target_id
from entente.rollouts.groups import play_missing
from entente.rollouts.improve_rounds import ImproveSettings, round_name
from entente.rollouts.resources import RolloutResources
from entente.telemetry.errors import DataError
from entente.telemetry.process_pool import ProcessPool
from state_cache.sampling import sample_start_positions
from storage.distil_targets import distil_target_path, open_distil_targets, publish_distil_targets
from storage.files import set_aside
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard, shard_path

VISITED_GROUPS = 8
"""Start groups of a task: enough concurrent requests for the engine, and few enough that labelling starts early."""


def visitor(number: int) -> str:
    return f"visit-{round_name(number)}"


def visited_positions(resources: RolloutResources, name: str, first_group: int, count: int) -> list[tuple[Snapshot, str]]:
    """(snapshot, power that the policy plays) of some start groups of a visitor, sampled in rounds of a step's size as in
    training, but seeded by the visitor's name: two visitors share positions no more often than two steps do."""
    rollouts, size = resources.rollouts, resources.rollouts.start_groups
    seed, positions = seed_of("producer", name, resources.seed), []
    for number in range(first_group // size, (first_group + count - 1) // size + 1):
        positions += sample_start_positions(resources.cache.train, size, seed, number + 1, sampling=rollouts.sampling)
    return positions[first_group % size :][:count]


async def visit(resources: RolloutResources, number: int, first_group: int) -> int:
    """Play and publish the round's start groups from `first_group` on, one fork each; returns the decisions to label."""
    alone = resources.rollouts.model_copy(update={"forks_per_group": 1})
    name = visitor(number)
    positions = visited_positions(resources, name, first_group, VISITED_GROUPS)
    await play_missing(resources, f"visit {number}", name, positions, first_group, rollouts=alone)
    shard = await asyncio.to_thread(open_shard, shard_path(resources.paths, name, first_group))
    return shard["status"].to_pylist().count("complete")


async def label(
    resources: RolloutResources, teachers: ProcessPool, improve: ImproveSettings, number: int, first_group: int, count: int
) -> int:
    """Publish the distillation targets of the first `count` decisions of a shard, unless done; returns their number."""
    final = distil_target_path(resources.paths, round_name(number), first_group)
    if final.exists():
        try:
            return open_distil_targets(final).table.num_rows
        except DataError:
            set_aside(final)
    visits = await asyncio.to_thread(_visits, resources.paths, visitor(number), first_group, count)
    teacher = json.dumps(improve.teacher, sort_keys=True)
    digest = hashlib.sha256(teacher.encode()).hexdigest()[:16]
    asked = [asyncio.ensure_future(_distil_target(resources, teachers, improve, row, digest)) for row in visits]
    try:
        made = await asyncio.gather(*asked)
    finally:  # a retry samples with the same request names, so none of this attempt may remain
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    distil_targets = [distil_target for distil_target in made if distil_target is not None]
    about = resources.provenance | {"teacher": teacher}
    await asyncio.to_thread(publish_distil_targets, resources.paths, round_name(number), first_group, distil_targets, about)
    return len(distil_targets)


def teacher_probabilities(values: Sequence[float], visits: Sequence[int], best: int, temperature: float) -> list[float]:
    """The teacher's distribution: a softmax of values by `temperature`; at 0 the best alone. Proposals that the search dropped
    early, with fewer playouts than the best, get 0."""
    if not temperature:
        return [float(place == best) for place in range(len(values))]
    top = max(value for value, seen in zip(values, visits, strict=True) if seen == visits[best])
    odds = [
        math.exp((value - top) / temperature) if seen == visits[best] else 0.0 for value, seen in zip(values, visits, strict=True)
    ]
    return [each / sum(odds) for each in odds]


async def _distil_target(
    resources: RolloutResources, teachers: ProcessPool, improve: ImproveSettings, row: dict[str, Any], teacher: str
) -> DistilTarget | None:
    """The distillation target of one decision; None if the search compared fewer than two order sets."""
    request, proposals = await resources.host.run(_propose(resources, improve, row))
    legal, snapshot = request.legal, row["snapshot"]
    result = await teachers.ask(search_apart, snapshot, request.power, proposals, improve.search, search_seed_name(request))
    if len(result.proposals) < 2:
        return None
    table, spelt = resources.tokens.tables.table(legal), []
    for orders in result.proposals:
        ids = resources.tokens.tables.spell(orders, legal)
        spelt.append((ids, *table.legal_sets(ids)))
    sizes = np.concatenate([np.diff(offsets) for _, _, offsets in spelt])
    return DistilTarget(
        distil_target_id=distil_target_id(f"{row['source']}/{teacher}", row["decision_id"]),
        decision_id=row["decision_id"],
        source=row["source"],
        snapshot_id=snapshot.snapshot_id,
        phase=snapshot.phase,
        power=request.power,
        policy_version=row["policy_version"],
        adapter_hash=row["adapter_hash"],
        temperature=row["temperature"],
        teacher=teacher,
        prompt_ids=row["input_ids"][: row["prompt_len"]],
        completion_ids=np.concatenate([ids for ids, _, _ in spelt]).astype(np.int32),
        completion_offsets=np.cumsum([0, *(len(ids) for ids, _, _ in spelt)]).astype(np.int32),
        legal_ids=np.concatenate([sets for _, sets, _ in spelt]),
        legal_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        orders=["; ".join(orders) for orders in result.proposals],
        probabilities=teacher_probabilities(result.values, result.visits, result.best, improve.temperature),
        values=result.values,
        visits=result.visits,
    )


async def _propose(
    resources: RolloutResources, improve: ImproveSettings, row: dict[str, Any]
) -> tuple[DecisionRequest, list[tuple[str, ...]]]:
    producer, snapshot = row["source"].partition("/")[0], row["snapshot"]
    rng_name = f"{producer}/{resources.seed}/{row['start_group']}/{row['fork']}/teacher"
    board = Board.restore(snapshot)
    request = DecisionRequest(
        game=rng_name,
        rng_name=rng_name,
        phase_index=row["phase_index"],
        power=row["power"],
        legal=board.legal_orders()[row["power"]],
        board=board,
        snapshot_id=snapshot.snapshot_id,
        temperature=row["temperature"],
    )
    proposals = list(await propose(request, PolicyPlayer(resources.engine, resources.tokens), improve.search))
    board.release()
    return request, proposals


def _visits(paths: RunPaths, producer: str, first_group: int, count: int) -> list[dict[str, Any]]:
    path = shard_path(paths, producer, first_group)
    decisions = open_shard(path)
    phases = {
        (phase_row["start_group"], phase_row["fork"], phase_row["phase_index"]): phase_row
        for phase_row in open_phases(path, decisions).to_pylist()
    }
    rows = []
    for row in decisions.to_pylist():
        if row["status"] == "complete" and len(rows) < count:
            phase_row = phases[row["start_group"], row["fork"], row["phase_index"]]
            position = {"source": f"{producer}/{path.name}", "game_id": row["game_id"], "seed": row["seed"]}
            snapshot = make_snapshot(phase_row["position"], row["phase"], **position)
            rows.append(row | {"source": position["source"], "snapshot": snapshot})
    return rows
