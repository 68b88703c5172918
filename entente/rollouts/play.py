"""Plays start groups and publishes them as shards.

Start groups that have a shard are never played again, whichever process published them. A damaged shard is set aside, and its
start groups are played again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from entente.decoding.thinking import Thinking
from entente.game.snapshot import Snapshot
from entente.players.shared_search import search_opponents
from entente.rollouts.fork import PlayedFork
from entente.rollouts.resources import PROBE, RolloutResources
from entente.rollouts.roll_out import StartGroup, decisions_of, plan_start_groups, plies_of, roll_out
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import disk_full
from entente.telemetry.progress import reporter
from state_cache.sampling import sample_start_positions
from storage.schema import as_array
from storage.shards import LOCAL_PRODUCER, Coverage, Shard, coverage, open_shard, publish_shard

_RETRY_S = 2.0
"""Seconds between two attempts to publish on a full disk."""
FULL_DISK_WAIT_S = 60.0
"""Seconds for which finished rollouts wait for space on a full disk before the run ends; it can be resumed."""
_POLL_S = 0.05
"""Seconds between two checks for a step's ledger."""

Figures = Mapping[str, float]
"""Counts of some rollouts by name, and in `..._ms` medians over decisions. What nobody counted is absent."""


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Consecutive start groups that one rollout task plays. All start from the positions of one step."""

    first_group: int
    """Number of the first start group."""
    count: int
    """Number of start groups."""
    step: int
    """The step whose positions they start from. Any step may train on the rows."""
    after: Path | None = None
    """Ledger of a step. The shard is published only once this file exists, so it cannot change what that step selects."""


async def play_stretch(resources: RolloutResources, stretch: Stretch) -> Figures:
    """Play the start groups of `stretch` and publish their shard; a retry after that plays nothing. Returns their figures."""
    with resources.spans.span("rollout"):
        first_of_step = (stretch.step - 1) * resources.rollouts.start_groups
        settings, stage = resources.rollouts.at(stretch.step), f"rollout {stretch.step}"
        drawn = resources.cache.train, settings.start_groups, resources.seed, stretch.step
        positions = await asyncio.to_thread(sample_start_positions, *drawn, sampling=settings.sampling)
        mine = positions[stretch.first_group - first_of_step :][: stretch.count]
        found = await play_missing(resources, stage, LOCAL_PRODUCER, mine, stretch.first_group, stretch.after, settings)
        return await asyncio.to_thread(rollout_figures, found, stretch.count, resources.tokens.thinking)


async def play_missing(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    after: Path | None = None,
    rollouts: RolloutSettings | None = None,
) -> Coverage:
    """Play the producer's start groups from `first_group` on, one per position, except those already published.

    Args:
        stage: name of the progress display.
        positions: (snapshot, power that the policy plays) pairs.
        after: publish only once this ledger exists.
        rollouts: settings to use instead of the run's.
    """
    count = len(positions)
    found = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    for first, stretch in found.missing:
        mine = positions[first - first_group : first - first_group + stretch]
        await _play_groups(resources, stage, producer, mine, first, rollouts or resources.rollouts, after)
    if found.missing:
        whole = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
        return replace(whole, set_aside=found.set_aside)
    return found


async def play_probe(resources: RolloutResources, version: int) -> None:
    """Play start groups under the trainer's version, for the comparison of engine and trainer.

    A resumed run whose rollouts were ahead has no rows of its trainer's version. These start groups have a single fork, so they
    have no advantage and no step selects them. Training therefore does not depend on where a run was resumed.
    """
    alone = resources.rollouts.model_copy(update={"forks_per_group": 1})
    count = resources.rollouts.forks_per_group
    with resources.spans.span("rollout"):
        positions = sample_start_positions(resources.cache.train, count, resources.seed, version)
        await play_missing(resources, "probe", PROBE, positions, version * count, rollouts=alone)


async def _play_groups(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    rollouts: RolloutSettings,
    after: Path | None,
) -> None:
    """Play these positions as the producer's start groups from `first_group` on, and publish all their rows as one shard."""
    done: list[int] = []
    settings = await asyncio.to_thread(resources.league.settings_for, rollouts, producer, first_group, resources.past.run_version)

    def on_group(number: int) -> None:
        done.append(number)
        reporter().stage(stage, len(done), len(positions))

    groups = plan_start_groups(positions, first_group, settings)
    forks = await resources.host.run(_roll_out(resources, groups, settings, producer, on_group))
    while after is not None and not await asyncio.to_thread(after.exists):
        await asyncio.sleep(_POLL_S)
    rows, end = (decisions_of(forks), plies_of(forks)), first_group + len(positions)
    publish = partial(publish_shard, resources.paths, producer, first_group, *rows, resources.provenance, next_start_group=end)
    await publish_when_there_is_room(publish, FULL_DISK_WAIT_S)


async def _roll_out(
    resources: RolloutResources,
    groups: Sequence[StartGroup],
    settings: RolloutSettings,
    producer: str,
    on_group: Callable[[int], None],
) -> list[PlayedFork]:
    """Play against the opponents of the settings, with empty prefix caches. Otherwise the last bits of log-probabilities would
    depend on what the engines drew before, and so on where a run was resumed."""
    async with resources.past.served(settings.opponent_versions) as versions:
        searching = search_opponents(settings.searching_opponents, resources.engine, resources.tokens)
        deciders = {**versions, **searching, **resources.endpoints.deciders}
        await resources.engine.forget_prefixes()
        named = {"producer": producer, "seed": resources.seed, "on_group": on_group, "deciders": deciders}
        return await roll_out(groups, resources.engine, resources.tokens, settings, **named)


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


def rollout_figures(found: Coverage, count: int, thinking: Thinking | None = None) -> Figures:
    """The figures of `count` start groups, computed from their published shards.

    Args:
        thinking: how their completions begin with a thought; None: thoughts are not counted.
    """
    columns = [
        "start_group", "fork", "status", "orders_rejected", "engine_ms", "prompt_len", "cached_tokens", "legal_offsets",
        "queue_ms", "prefill_ms", "decode_ms", *(["legal_ids"] if thinking else []),
    ]  # fmt: skip
    tables = [open_shard(shard.path).select(columns).replace_schema_metadata(None) for shard in found.published]
    rows = pa.concat_tables(tables).combine_chunks() if tables else None
    counted = {"start_groups": float(count), "set_aside": float(len(found.set_aside))}
    if rows is None or not rows.num_rows:
        return counted | dict.fromkeys(("decisions", "failed", "orders_rejected"), 0.0)
    forks = rows.select(["start_group", "fork", "status"]).to_pylist()
    single = {name: rows[name].to_numpy() for name in rows.schema.names if name.endswith(("_ms", "_len", "tokens", "rejected"))}
    return (
        counted
        | {
            "decisions": float(rows.num_rows),
            "failed": float(len({(each["start_group"], each["fork"]) for each in forks if each["status"] != "complete"})),
            "orders_rejected": float(single["orders_rejected"].sum()),
            "prompt_tokens": float(single["prompt_len"].sum()),
            "cached_tokens": float(single["cached_tokens"].sum()),
        }
        | {name: float(np.median(values)) for name, values in single.items() if name.endswith("_ms")}
        | _completion_figures(rows)
        | ({} if thinking is None else _thought_figures(rows, thinking))
    )


def add_up(tasks: Sequence[Figures]) -> dict[str, float]:
    """The figures of several tasks as one: sums of counts, medians of medians."""
    total = Counter[str]()
    for each in tasks:
        total.update(each)
    medians = {name: median(each[name] for each in tasks if name in each) for name in total if name.endswith("_ms")}
    return dict(total) | medians


def _completion_figures(rows: pa.Table) -> dict[str, float]:
    """Completion tokens, and those that had a single legal id."""
    bounds = as_array(rows["legal_offsets"])
    starts = bounds.offsets.to_numpy() - bounds.offsets[0].as_py()
    # A row has one offset more than completion tokens. The difference from its last offset to the next row's first is no token.
    legal_ids = np.diff(bounds.flatten().to_numpy())
    is_token = np.ones(len(legal_ids), bool)
    is_token[starts[1:-1] - 1] = False
    return {
        "completion_tokens": float(np.count_nonzero(is_token)),
        "forced_tokens": float(np.count_nonzero(legal_ids[is_token] == 1)),
    }


def _thought_figures(rows: pa.Table, thinking: Thinking) -> dict[str, float]:
    """Decisions with a thought, tokens drawn in these, drawn end markers included, and thoughts that the budget ended."""
    sets = as_array(rows["legal_ids"])
    starts = sets.offsets.to_numpy() - sets.offsets[0].as_py()
    ids = sets.flatten().to_numpy()
    # Each open set has one negative number, and the open sets of a completion are its first.
    before = np.concatenate([[0], np.cumsum(ids < 0)])
    drawn = before[starts[1:]] - before[starts[:-1]]
    after_thought = ids[starts[:-1] + 2 * drawn]
    return {
        "thoughts": float(rows.num_rows),
        "thought_tokens": float(drawn.sum()),
        "forced_thoughts": float(np.count_nonzero(after_thought == thinking.marker)),
    }
