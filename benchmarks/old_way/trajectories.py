"""Rows on their way to the trainer: indented JSON files with texts that are tokenised again, or one Arrow shard with token ids.

As the old system, the JSON way writes strings, reads files whole and tokenises prompt and completion a second time. The new
tokens may differ from the drawn ones, so log-probabilities are cut or filled to fit. An advantage group has one game, power and
phase. Both ways drop groups without spread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from benchmarks.old_way.play import Row
from benchmarks.old_way.ways import Way
from benchmarks.trainer_cases import offsets_of
from decoding.codec import Codec
from game.scores import components
from records.rows import Decision, decision_id
from storage.gather import Batch
from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import publish_shard

PRODUCER = "old-way"
MIN_VARIANCE = 0.01
"""min_reward_variance of the old system: groups whose returns vary less are dropped."""


def write(way: Way, folder: Path, step: int, rows: Sequence[Row], codec: Codec) -> None:
    """Write the rows of a step."""
    if way.arrow:
        paths = RunPaths(folder / f"step-{step:05d}").create()
        publish_shard(paths, PRODUCER, min(row.group for row in rows), [_decision(row) for row in rows], [], {})
        return
    target = folder / f"step-{step:05d}"
    target.mkdir(parents=True, exist_ok=True)
    for group in sorted({row.group for row in rows}):
        records = [_record(way, row, codec) for row in rows if row.group == group]
        (target / f"rollout-{group:06d}.json").write_text(json.dumps(records, indent=2))


def read(way: Way, folder: Path, step: int, tokenizer: Tokenizer, eos: int) -> tuple[Batch, int]:
    """The batch of a step, without groups of no spread, and the number of decisions rolled out for the step."""
    if way.arrow:
        return _read_shard(RunPaths(folder / f"step-{step:05d}"), None if way.kept_tokens else tokenizer)
    files = sorted((folder / f"step-{step:05d}").glob("rollout-*.json"))
    records = [record for file in files for record in json.loads(file.read_text())]
    if not way.kept_tokens:
        for record in records:
            ids = tokenizer.encode(record["prompt"], add_special_tokens=False).ids
            answer = [*tokenizer.encode(record["completion"], add_special_tokens=False).ids, eos]
            record |= {"prompt_ids": ids, "completion_ids": answer}
    kept, groups = _rows_with_spread([record["group_id"] for record in records], [record["reward"] for record in records])
    return _as_batch([records[row] for row in kept], groups), len(records)


def _record(way: Way, row: Row, codec: Codec) -> dict[str, Any]:
    ids = row.generation.token_ids.tolist()
    record: dict[str, Any] = {
        "game_id": f"game_{row.group:06d}",
        "group_id": f"game_{row.group:06d}_{row.power}_step{row.ply}",
        "fork": row.fork,
        "power": row.power,
        "phase": row.phase,
        "orders": list(row.orders),
        "reward": row.reward,
        "completion_logprobs": [float(value) for value in row.generation.logprobs],
    }
    if way.kept_tokens:
        record |= {"prompt_ids": [int(token) for token in row.prompt_ids], "completion_ids": ids}
    else:
        text = codec.decode(token for token in ids if token != codec.eos_id)
        record |= {"prompt": row.prompt, "completion": text}
    if way.packing:
        record |= {"legal_ids": row.legal_ids.tolist(), "legal_offsets": row.legal_offsets.tolist()}
    return record


def _decision(row: Row) -> Decision:
    assert row.until is not None
    parts: dict[str, Any] = components(row.before, row.until, row.power)
    generation = row.generation
    return Decision(
        decision_id=decision_id(PRODUCER, row.group, row.fork, row.ply, row.power),
        snapshot_id=f"{row.group}",
        start_group=row.group,
        fork=row.fork,
        ply=row.ply,
        power=row.power,
        phase=row.phase,
        game_id="",
        seed=0,
        opponents="random",
        policy_version=0,
        worker=generation.worker,
        adapter_hash=generation.policy.adapter_hash,
        input_ids=np.concatenate([np.asarray(row.prompt_ids, np.int32), generation.token_ids]),
        prompt_len=len(row.prompt_ids),
        behaviour_logprobs=generation.logprobs,
        legal_ids=row.legal_ids,
        legal_offsets=row.legal_offsets,
        temperature=1.0,
        orders=row.orders,
        orders_rejected=0,
        status="complete",
        reason="",
        ended="horizon",
        **asdict(generation.cost),
        engine_ms=0.0,
        **parts,
    )


def _read_shard(paths: RunPaths, tokenizer: Tokenizer | None) -> tuple[Batch, int]:
    """As `read`, from a shard. With a tokenizer every row is also decoded and encoded, as a trainer of texts must do."""
    index = open_index(paths)
    rows = index.fresh_rows(policy_version=0, limit=1 << 20)
    if tokenizer is not None:
        whole = index.gather(rows)
        for ids in np.split(whole.input_ids, whole.input_offsets[1:-1]):
            tokenizer.encode(tokenizer.decode(ids.tolist(), skip_special_tokens=False), add_special_tokens=False)
    keys = zip(*(rows[name].to_pylist() for name in ("start_group", "power", "phase")), strict=True)
    kept, groups = _rows_with_spread([str(key) for key in keys], rows["return"].to_pylist())
    column = rows.schema.get_field_index("advantage_group")
    chosen = rows.take(pa.array(kept, pa.int64())).set_column(column, rows.schema.field(column), pa.array(groups))
    return index.gather(chosen), rows.num_rows


def _rows_with_spread(keys: Sequence[str], returns: Sequence[float]) -> tuple[list[int], np.ndarray]:
    """Numbers of the rows whose group has at least two members and spread, and the group of each, from 0."""
    members: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    groups = [rows for rows in members.values() if len(rows) > 1 and np.var([returns[row] for row in rows]) > MIN_VARIANCE]
    numbers = np.repeat(np.arange(len(groups), dtype=np.int32), [len(rows) for rows in groups])
    return [row for rows in groups for row in rows], numbers


def _as_batch(records: Sequence[Mapping[str, Any]], groups: np.ndarray) -> Batch:
    """Rows of JSON as a batch; log-probabilities are cut or filled to the number of tokens."""
    inputs = [[*record["prompt_ids"], *record["completion_ids"]] for record in records]
    lengths = [len(record["completion_ids"]) for record in records]
    fitted, legal_ids, legal_sizes = [], [], []
    for record, length in zip(records, lengths, strict=True):
        given = record["completion_logprobs"][:length]
        fitted.extend(given + [0.0] * (length - len(given)))
        bounds = record.get("legal_offsets", [])
        fits = len(bounds) == length + 1
        legal_ids.extend(record["legal_ids"] if fits else record["completion_ids"])
        legal_sizes.extend(np.diff(bounds).tolist() if fits else [1] * length)
    return Batch(
        decision_ids=np.arange(len(records), dtype=np.int64),
        input_ids=np.array([token for ids in inputs for token in ids], np.int32),
        input_offsets=offsets_of([len(ids) for ids in inputs]),
        prompt_lens=np.array([len(record["prompt_ids"]) for record in records], np.int32),
        behaviour_logprobs=np.array(fitted, np.float32),
        completion_offsets=offsets_of(lengths),
        legal_ids=np.array(legal_ids, np.int32),
        legal_offsets=offsets_of(legal_sizes),
        temperatures=np.ones(len(records), np.float32),
        returns=np.array([record["reward"] for record in records], np.float64),
        advantage_groups=groups,
        policy_versions=np.zeros(len(records), np.int32),
    )
