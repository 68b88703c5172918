"""Play some start groups of a step and publish them as one shard; read what is published already.

Promise: start groups that have a shard are never played again, whoever published them. A damaged shard is set aside, and its
groups are played again.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from game.snapshot import Snapshot
from pipeline.resources import PROBE, PRODUCER, Resources, RolloutResources
from rollouts.roll_out import plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from storage.schema import as_array
from storage.shards import Coverage, Shard, coverage, open_shard, publish_shard
from telemetry.errors import disk_full
from telemetry.progress import reporter

_LOOK_S = 2.0
"""Seconds between two tries to publish on a full disk."""
_CHOSEN_S = 0.05
"""Seconds between two looks whether a step has chosen its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What inference engines did for some decisions, whichever process they were in: from the rows themselves."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    completion_tokens: int
    forced_tokens: int
    """Completion tokens that had a single legal id."""
    queue_ms: float
    """Median over decisions."""
    prefill_ms: float
    """Median over decisions."""
    decode_ms: float
    """Median over decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What a rollout task did."""

    start_groups: int
    decisions: int
    failed_forks: int
    orders_rejected: int
    set_aside: int
    """Damaged shards that were found in their place."""
    seconds: float
    """Seconds of playing and publishing; 0 if nothing had to be played."""
    engine_work: EngineWork | None
    """None where there are no decisions, or no engine drew them."""
    engine_ms: float | None
    """Median over decisions: the game engine at their ply. None where there are no decisions."""


async def play_stretch(
    resources: RolloutResources, step: int, first_group: int, count: int, after: Path | None = None
) -> RolloutReport:
    """Play start groups `first_group` .. `first_group + count - 1` of `step` and publish their shard; see `Stretch.after`.

    A retry after the shard was published finds it and plays nothing.
    """
    began, first_of_step = time.monotonic(), (step - 1) * resources.rollouts.start_groups
    with resources.spans.span("rollout"):
        positions = await asyncio.to_thread(start_positions, resources, step)
        mine = positions[first_group - first_of_step :][:count]
        report = await play_missing(resources, f"rollout {step}", PRODUCER, mine, first_group, after)
    return replace(report, seconds=time.monotonic() - began)


async def play_missing(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    after: Path | None = None,
) -> RolloutReport:
    """Play those of the producer's start groups from `first_group` on, one for each position, that no shard holds; they are
    published once the ledger `after` stands, if one is named."""
    began, count = time.monotonic(), len(positions)
    found = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    for first, stretch in found.missing:
        mine = positions[first - first_group : first - first_group + stretch]
        await play_groups(resources, stage, producer, mine, first, after=after)
    whole = found if not found.missing else await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    report = await asyncio.to_thread(report_of, whole, count)
    return replace(report, set_aside=len(found.set_aside), seconds=time.monotonic() - began)


async def play_probe(resources: Resources, version: int) -> None:
    """Play some start groups under the version that engine and trainer hold, to compare them on.

    A resumed run whose rollouts ran ahead has no row of its trainer's version. Each of these start groups has a single fork, from
    which nothing can be learned: no step ever chooses one, so what is trained on does not depend on where a run was resumed.
    """
    alone = resources.rollouts.model_copy(update={"forks_per_group": 1, "branch_at": ()})
    count = resources.rollouts.forks_per_group
    with resources.spans.span("rollout"):
        found = await asyncio.to_thread(coverage, resources.paths, PROBE, version * count, count)
        if found.missing:
            positions = sample_start_positions(resources.cache.train, count, resources.seed, version)
            await play_groups(resources, "probe", PROBE, positions, version * count, rollouts=alone)


def start_positions(resources: RolloutResources, step: int) -> list[tuple[Snapshot, str]]:
    """The positions of `step`, and the power that the policy plays in each; the same whenever it is asked.

    What past groups taught counts up to the newest step that was whole before any task of this one could begin: rollouts run
    ahead of the trainer by at most the policy lag, whatever buffer depth a resumed run is given.
    """
    wanted, spreads = resources.rollouts, None
    if wanted.sampling == "learnable":
        whole = max(0, step - 1 - resources.max_policy_lag)
        spreads = resources.past_spreads.before(PRODUCER, whole * wanted.start_groups)
    return sample_start_positions(
        resources.cache.train, wanted.start_groups, resources.seed, step, sampling=wanted.sampling, spreads=spreads
    )


async def play_groups(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    *,
    rollouts: RolloutSettings | None = None,
    after: Path | None = None,
) -> None:
    """Play these positions as the producer's start groups from `first_group` on, and publish their shard.

    Args:
        rollouts: how, if not as the run does.
        after: a step's ledger that must stand before.
    """
    done: list[int] = []
    wanted = rollouts or resources.rollouts

    def on_group(number: int) -> None:
        done.append(number)
        reporter().stage(stage, len(done), len(positions))

    played = await resources.host.run(
        roll_out(
            plan_start_groups(positions, first_group, wanted),
            resources.engine,
            resources.tokens,
            wanted,
            producer=producer,
            seed=resources.seed,
            on_group=on_group,
            frozen=resources.frozen.deciders,
        )
    )
    await chosen(after)
    await publish_when_there_is_room(
        partial(
            publish_shard,
            resources.paths,
            producer,
            first_group,
            played.decisions,
            played.plies,
            resources.provenance,
            next_start_group=first_group + len(positions),
        ),
        resources.full_disk_wait_s,
    )


async def chosen(ledger: Path | None) -> None:
    """Wait until a step's ledger stands, if one is named: from then on nothing that is published can change its rows."""
    while ledger is not None and not await asyncio.to_thread(ledger.exists):
        await asyncio.sleep(_CHOSEN_S)


async def publish_when_there_is_room(publish: Callable[[], Shard], wait_s: float) -> Shard:
    """Publish what was played; while the disk is full it stays in memory and nothing more is played in its place.

    Raises:
        OSError: there was no room for `wait_s` seconds.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            return await asyncio.to_thread(publish)
        except OSError as error:
            full, left = disk_full(error), until - time.monotonic()
            if full is None or left <= 0:
                raise
            reporter().say(f"{full}; rollouts pause, for {left:.0f} s at most")
            await asyncio.sleep(min(_LOOK_S, left))


def report_of(found: Coverage, count: int) -> RolloutReport:
    """What the published shards say of the rollouts of `count` start groups."""
    columns = [
        "start_group", "fork", "status", "orders_rejected", "engine_ms", "prompt_len", "cached_tokens", "legal_offsets",
        "queue_ms", "prefill_ms", "decode_ms",
    ]  # fmt: skip
    tables = [open_shard(shard.path).select(columns).replace_schema_metadata(None) for shard in found.published]
    rows = pa.concat_tables(tables).combine_chunks() if tables else None
    if rows is None or not rows.num_rows:
        rows, forks = None, []
    else:
        forks = rows.select(["start_group", "fork", "status"]).to_pylist()
    return RolloutReport(
        start_groups=count,
        decisions=len(forks),
        failed_forks=len({(each["start_group"], each["fork"]) for each in forks if each["status"] != "complete"}),
        orders_rejected=0 if rows is None else int(rows["orders_rejected"].to_numpy().sum()),
        set_aside=len(found.set_aside),
        seconds=0.0,
        engine_work=None if rows is None else _engine_work(rows),
        engine_ms=None if rows is None else float(np.median(rows["engine_ms"].to_numpy())),
    )


def _engine_work(rows: pa.Table) -> EngineWork:
    bounds = as_array(rows["legal_offsets"])
    starts = bounds.offsets.to_numpy() - bounds.offsets[0].as_py()
    # A row has one bound more than completion tokens; the step from its last bound to the next row's first is no token.
    legal_ids = np.diff(bounds.flatten().to_numpy())
    is_token = np.ones(len(legal_ids), bool)
    is_token[starts[1:-1] - 1] = False
    return EngineWork(
        prompt_tokens=int(rows["prompt_len"].to_numpy().sum()),
        cached_tokens=int(rows["cached_tokens"].to_numpy().sum()),
        completion_tokens=int(np.count_nonzero(is_token)),
        forced_tokens=int(np.count_nonzero(legal_ids[is_token] == 1)),
        **{name: float(np.median(rows[name].to_numpy())) for name in ("queue_ms", "prefill_ms", "decode_ms")},
    )
