"""Positions that a run's rollouts reached, as snapshots for later rollouts; deterministic in the start groups. Held-out
positions and those from forks that started at one are excluded, so training never sees evaluation positions."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

from entente.game.snapshot import Snapshot, make_snapshot, position_id
from entente.telemetry.errors import DataError
from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import open_phases, shard_names

RECENT = 1024
"""Newest start groups whose positions are used: the policy has changed since it played older ones."""

_REACHED = Path(__file__).with_name("reached.sql").read_text()


def reached_positions(paths: RunPaths, *, producer: str, before: int, held_out: Collection[str]) -> list[Snapshot]:
    """Positions that the `producer`'s start groups below `before` reached, newest first, except the ids `held_out`. Raises
    DataError if a shard is damaged or a position does not match the snapshot id of its row: what else there is would make another
    cache of the same name."""
    index = open_index(paths, only=_recent_shards(paths, producer, before))
    if index.refused:
        name, why = index.refused[0]
        raise DataError(f"{len(index.refused)} of the run's shards cannot be read, first {name}: {why} Move them out of the run.")
    index.connection.register("held_out", pa.table({"snapshot_id": pa.array(sorted(held_out), pa.string())}))
    values = {"producer": producer, "before": before, "recent": RECENT}
    reached = index.connection.execute(_REACHED, values).fetchall()
    positions = dict(_positions(paths, sorted({shard for shard, *_ in reached})))
    return [
        _snapshot(positions[shard, row], name, phase, f"{paths.root.name}-{producer}-{group:06d}-{fork}", version, seed, power)
        for shard, row, name, phase, group, fork, version, seed, power in reached
    ]


def _recent_shards(paths: RunPaths, producer: str, before: int) -> list[str]:
    """Shards that may have start groups from `before - RECENT` to `before - 1`. A shard is named after its first one."""
    firsts = {int(Path(name).stem): name for name in shard_names(paths) if name.startswith(f"{producer}/")}
    first = max((number for number in firsts if number <= before - RECENT), default=0)
    return [name for number, name in firsts.items() if first <= number < before]


def _positions(paths: RunPaths, shards: list[str]) -> Iterator[tuple[tuple[str, int], str]]:
    """(shard, row) -> position JSON of every phase of these shards."""
    for shard in shards:
        for row, text in enumerate(open_phases(paths.shards / shard)["position"].to_pylist()):
            yield (shard, row), text


def _snapshot(position: str, name: str, phase: str, game_id: str, version: int, seed: int, power: str) -> Snapshot:
    if position_id(position) != name:
        raise DataError(f"a phase in {phase} of {game_id} holds another position than {name}: its shard is damaged, remove it.")
    return make_snapshot(position, phase, source=f"policy:{version}", game_id=game_id, seed=seed, power=power)
