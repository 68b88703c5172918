"""Plays start groups and publishes them as shards.

Start groups that have a shard are never played again, whichever process published them. A damaged shard is set aside, and its
start groups are played again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from decoding.thinking import Thinking
from game.snapshot import Snapshot
from inference.engine import forget_prefixes
from pipeline.resources import PROBE, PRODUCER, Resources, RolloutResources
from pipeline.search_opponents import search_opponents
from pipeline.start_positions import start_positions
from records.rows import Decision, Ply
from rollouts.roll_out import RolledOut, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from storage.schema import as_array
from storage.shards import Coverage, Shard, coverage, open_shard, publish_shard
from telemetry.errors import disk_full
from telemetry.progress import reporter

_RETRY_S = 2.0
"""Seconds between two attempts to publish on a full disk."""
FULL_DISK_WAIT_S = 60.0
"""Seconds for which finished rollouts wait for space on a full disk before the run ends; it can be resumed."""
_POLL_S = 0.05
"""Seconds between two checks for a step's ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """Work of the inference engines for some decisions, computed from the rows."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    completion_tokens: int
    forced_tokens: int
    """Completion tokens that had a single legal id."""
    thoughts: int = 0
    """Decisions with a thought; 0 if the model orders at once."""
    thought_tokens: int = 0
    """Tokens drawn in these thoughts, drawn end markers included."""
    forced_thoughts: int = 0
    """Thoughts that the budget ended."""
    queue_ms: float
    """Median over decisions."""
    prefill_ms: float
    """Median over decisions."""
    decode_ms: float
    """Median over decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """Result of a rollout task."""

    start_groups: int
    decisions: int
    failed_forks: int
    orders_rejected: int
    set_aside: int
    """Number of damaged shards that were set aside."""
    seconds: float
    """Seconds of playing and publishing; 0 if nothing had to be played."""
    engine_work: EngineWork | None
    """None if there are no decisions, or no engine drew them."""
    engine_ms: float | None
    """Milliseconds in the game engine at a ply, median over decisions; None if there are no decisions."""


async def play_stretch(
    resources: RolloutResources, step: int, first_group: int, count: int, after: Path | None = None
) -> RolloutReport:
    """Play start groups `first_group` .. `first_group + count - 1` of `step` and publish their shard.

    A retry after the shard was published plays nothing. For `after` see `Stretch`.
    """
    began = time.monotonic()
    with resources.spans.span("rollout"):
        first_of_step = (step - 1) * resources.rollouts.start_groups
        positions = await asyncio.to_thread(start_positions, resources, step)
        mine = positions[first_group - first_of_step :][:count]
        settings = resources.rollouts.at(step)
        report = await play_missing(resources, f"rollout {step}", PRODUCER, mine, first_group, after, settings)
    return replace(report, seconds=time.monotonic() - began)


async def play_missing(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    after: Path | None = None,
    rollouts: RolloutSettings | None = None,
) -> RolloutReport:
    """Play the producer's start groups from `first_group` on, one per position, except those already published.

    Args:
        stage: name of the progress display.
        positions: (snapshot, power that the policy plays) pairs.
        after: publish only once this ledger exists.
        rollouts: settings to use instead of the run's.
    """
    began, count = time.monotonic(), len(positions)
    found = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    for first, stretch in found.missing:
        mine = positions[first - first_group : first - first_group + stretch]
        await play_groups(resources, stage, producer, mine, first, rollouts=rollouts, after=after)
    whole = found if not found.missing else await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    report = await asyncio.to_thread(report_of, whole, count, resources.tokens.thinking)
    return replace(report, set_aside=len(found.set_aside), seconds=time.monotonic() - began)


async def play_probe(resources: Resources, version: int) -> None:
    """Play start groups under the trainer's version, for the comparison of engine and trainer.

    A resumed run whose rollouts were ahead has no rows of its trainer's version. These start groups have a single fork, so they
    have no advantage and no step selects them. Training therefore does not depend on where a run was resumed.
    """
    alone = resources.rollouts.model_copy(update={"forks_per_group": 1})
    count = resources.rollouts.forks_per_group
    with resources.spans.span("rollout"):
        found = await asyncio.to_thread(coverage, resources.paths, PROBE, version * count, count)
        if found.missing:
            positions = sample_start_positions(resources.cache.train, count, resources.seed, version)
            await play_groups(resources, "probe", PROBE, positions, version * count, rollouts=alone)


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
        rollouts: settings to use instead of the run's.
        after: publish only once this ledger exists.
    """
    played = await roll_out_groups(resources, stage, producer, positions, first_group, rollouts)
    await wait_for_ledger(after)
    await publish_groups(resources, producer, first_group, len(positions), played.decisions, played.plies)


async def roll_out_groups(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    rollouts: RolloutSettings | None = None,
) -> RolledOut:
    """Play these positions as the producer's start groups from `first_group` on. Publishes nothing."""
    done: list[int] = []
    settings = await asyncio.to_thread(
        resources.league.settings_for, rollouts or resources.rollouts, producer, first_group, resources.past.run_version
    )

    def on_group(number: int) -> None:
        done.append(number)
        reporter().stage(stage, len(done), len(positions))

    groups = plan_start_groups(positions, first_group, settings)
    named = {"producer": producer, "seed": resources.seed, "on_group": on_group}
    rolling = partial(roll_out, groups, resources.engine, resources.tokens, settings, **named)
    return await resources.host.run(_roll_out(resources, rolling, settings))


async def publish_groups(
    resources: RolloutResources,
    producer: str,
    first_group: int,
    count: int,
    decisions: Sequence[Decision],
    plies: Sequence[Ply],
) -> Shard:
    """Publish all rows of the producer's start groups `first_group` .. `first_group + count - 1` as one shard."""
    publish = partial(
        publish_shard,
        resources.paths,
        producer,
        first_group,
        decisions,
        plies,
        resources.provenance,
        next_start_group=first_group + count,
    )
    return await publish_when_there_is_room(publish, FULL_DISK_WAIT_S)


async def _roll_out(
    resources: RolloutResources, rolling: Callable[..., Awaitable[RolledOut]], settings: RolloutSettings
) -> RolledOut:
    """Play against the opponents of the settings, with empty prefix caches. Otherwise the last bits of log-probabilities would
    depend on what the engines drew before, and so on where a run was resumed."""
    async with resources.past.served(settings.opponent_versions) as versions:
        searching = search_opponents(settings.searching_opponents, resources.past.engine, resources.tokens)
        deciders = {**versions, **searching, **resources.endpoints.deciders}
        for engine in {resources.engine, resources.past.engine}:
            await forget_prefixes(engine)
        return await rolling(deciders=deciders)


async def wait_for_ledger(ledger: Path | None) -> None:
    """Wait until a step's ledger exists. After that, published shards cannot change its rows. None: return at once."""
    while ledger is not None and not await asyncio.to_thread(ledger.exists):
        await asyncio.sleep(_POLL_S)


async def publish_when_there_is_room(publish: Callable[[], Shard], wait_s: float) -> Shard:
    """Call `publish`, and try again while the disk is full. The rows stay in memory, and rollouts pause.

    Raises:
        OSError: publishing failed for another reason, or the disk was full for `wait_s` seconds.
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
            await asyncio.sleep(min(_RETRY_S, left))


def report_of(found: Coverage, count: int, thinking: Thinking | None = None) -> RolloutReport:
    """The report of `count` start groups, computed from their published shards.

    Args:
        thinking: how their completions begin with a thought; None: thoughts are not counted.
    """
    columns = [
        "start_group", "fork", "status", "orders_rejected", "engine_ms", "prompt_len", "cached_tokens", "legal_offsets",
        "queue_ms", "prefill_ms", "decode_ms", *(["legal_ids"] if thinking else []),
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
        engine_work=None if rows is None else _add_thoughts(_engine_work(rows), rows, thinking),
        engine_ms=None if rows is None else _median(rows, "engine_ms"),
    )


def _engine_work(rows: pa.Table) -> EngineWork:
    bounds = as_array(rows["legal_offsets"])
    starts = bounds.offsets.to_numpy() - bounds.offsets[0].as_py()
    # A row has one offset more than completion tokens. The difference from its last offset to the next row's first is no token.
    legal_ids = np.diff(bounds.flatten().to_numpy())
    is_token = np.ones(len(legal_ids), bool)
    is_token[starts[1:-1] - 1] = False
    return EngineWork(
        prompt_tokens=int(rows["prompt_len"].to_numpy().sum()),
        cached_tokens=int(rows["cached_tokens"].to_numpy().sum()),
        completion_tokens=int(np.count_nonzero(is_token)),
        forced_tokens=int(np.count_nonzero(legal_ids[is_token] == 1)),
        queue_ms=_median(rows, "queue_ms"),
        prefill_ms=_median(rows, "prefill_ms"),
        decode_ms=_median(rows, "decode_ms"),
    )


def _median(rows: pa.Table, column: str) -> float:
    return float(np.median(rows[column].to_numpy()))


def _add_thoughts(work: EngineWork, rows: pa.Table, thinking: Thinking | None) -> EngineWork:
    """`work` with its counts of thoughts."""
    if thinking is None:
        return work
    sets = as_array(rows["legal_ids"])
    starts = sets.offsets.to_numpy() - sets.offsets[0].as_py()
    ids = sets.flatten().to_numpy()
    # Each open set has one negative number, and the open sets of a completion are its first.
    before = np.concatenate([[0], np.cumsum(ids < 0)])
    drawn = before[starts[1:]] - before[starts[:-1]]
    after_thought = ids[starts[:-1] + 2 * drawn]
    return replace(
        work,
        thoughts=rows.num_rows,
        thought_tokens=int(drawn.sum()),
        forced_thoughts=int(np.count_nonzero(after_thought == thinking.marker)),
    )
