"""The figures of rollouts: counts and times, computed from the published rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import pyarrow as pa

from entente.decoding.thinking import Thinking
from storage.arrow_files import as_array
from storage.shards import Coverage, open_shard

Figures = Mapping[str, float]
"""Counts of some rollouts by name, and in `..._ms` medians over decisions. Uncounted figures are absent, also times that a vLLM
server does not report, which are 0 in all rows."""


def rollout_figures(covered: Coverage, count: int, thinking: Thinking | None = None) -> Figures:
    """The figures of `count` start groups, from their published shards; `thinking` None: thoughts are not counted."""
    columns = [
        "start_group", "fork", "status", "orders_rejected", "engine_ms", "prompt_len", "cached_tokens", "legal_offsets",
        "queue_ms", "prefill_ms", "decode_ms", *(["legal_ids"] if thinking else []),
    ]  # fmt: skip
    tables = [open_shard(shard.path).select(columns).replace_schema_metadata(None) for shard in covered.published]
    rows = pa.concat_tables(tables).combine_chunks() if tables else None
    failed = float(sum(len(shard.failed_without_rows) for shard in covered.published))
    counted = {"start_groups": float(count), "set_aside": float(len(covered.set_aside)), "failed": failed}
    if rows is None or not rows.num_rows:
        return counted | {"decisions": 0.0, "orders_rejected": 0.0}
    forks = rows.select(["start_group", "fork", "status"]).to_pylist()
    single = {name: rows[name].to_numpy() for name in rows.schema.names if name.endswith(("_ms", "_len", "tokens", "rejected"))}
    return (
        counted
        | {
            "decisions": float(rows.num_rows),
            "failed": failed + len({(each["start_group"], each["fork"]) for each in forks if each["status"] != "complete"}),
            "orders_rejected": float(single["orders_rejected"].sum()),
            "prompt_tokens": float(single["prompt_len"].sum()),
            "cached_tokens": float(single["cached_tokens"].sum()),
        }
        | {name: float(np.median(values)) for name, values in single.items() if name.endswith("_ms") and values.any()}
        | _completion_figures(rows)
        | ({} if thinking is None else _thought_figures(rows, thinking))
    )


def add_up(tasks: Sequence[Figures]) -> dict[str, float]:
    """Sums of counts, medians of medians."""
    total = Counter[str]()
    for each in tasks:
        total.update(each)
    medians = {name: median(each[name] for each in tasks if name in each) for name in total if name.endswith("_ms")}
    return dict(total) | medians


def _completion_figures(rows: pa.Table) -> dict[str, float]:
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
    """Decisions with a thought, tokens sampled in these (including sampled end markers), and thoughts cut off by the budget."""
    sets, bounds = as_array(rows["legal_ids"]), as_array(rows["legal_offsets"])
    starts, first_bounds = (each.offsets.to_numpy() - each.offsets[0].as_py() for each in (sets, bounds))
    ids = sets.flatten().to_numpy()
    # Each open set has one negative number, and the open sets of a completion are its first.
    before = np.concatenate([[0], np.cumsum(ids < 0)])
    sampled = before[starts[1:]] - before[starts[:-1]]
    after_thought = ids[starts[:-1] + bounds.flatten().to_numpy()[first_bounds[:-1] + sampled]]
    return {
        "thoughts": float(rows.num_rows),
        "thought_tokens": float(sampled.sum()),
        "forced_thoughts": float(np.count_nonzero(after_thought == thinking.marker)),
    }
