"""How rows reach the trainer: indented JSON files of texts, tokenised again; or one Arrow shard of the drawn ids.

Stands for the old system's trajectories: strings were shipped and files were read whole, prompt and completion were tokenised a
second time for the trainer, and what came out need not be what was drawn; log-probabilities were then cut or filled to fit.
Its groups are those of a game, a power and a step counted in phases; decisions of a group without spread teach nothing in either
way and are dropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.old_way.play import Row
from benchmarks.old_way.ways import Way
from benchmarks.trainer_cases import offsets_of
from decoding.codec import Codec
from game.scores import components
from records.rows import Decision, decision_id
from storage.gather import Batch
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import publish_shard

PRODUCER = "old-way"
MIN_VARIANCE = 0.01
"""The old system's min_reward_variance: groups whose returns vary less are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnable:
    """What a step trains on."""

    batch: Batch
    rows: int
    """Decisions that were rolled out for it."""
    realigned: int
    """Rows whose tokens, made again, were as many as the log-probabilities no more."""


def write(way: Way, folder: Path, step: int, rows: Sequence[Row], codec: Codec) -> None:
    """Publish the rows of a step."""
    if way.arrow:
        paths = RunPaths(folder / f"step-{step:05d}").create()
        publish_shard(paths, PRODUCER, min(row.group for row in rows), [_decision(row) for row in rows], [], {})
        return
    target = folder / f"step-{step:05d}"
    target.mkdir(parents=True, exist_ok=True)
    for group in sorted({row.group for row in rows}):
        records = [_record(way, row, codec) for row in rows if row.group == group]
        (target / f"rollout-{group:06d}.json").write_text(json.dumps(records, indent=2))


def read(way: Way, folder: Path, step: int, tokenizer: Tokenizer, eos: int) -> Learnable:
    """The batch of a step, without groups that teach nothing."""
    if way.arrow:
        batch, keys = _from_shard(RunPaths(folder / f"step-{step:05d}"))
        realigned = 0 if way.kept_tokens else _tokenise_again(batch, tokenizer)
        return _taught(batch, keys, realigned)
    records = [
        record for file in sorted((folder / f"step-{step:05d}").glob("rollout-*.json")) for record in json.loads(file.read_text())
    ]
    realigned = 0
    if not way.kept_tokens:
        for record in records:
            ids = tokenizer.encode(record["prompt"], add_special_tokens=False).ids
            answer = [*tokenizer.encode(record["completion"], add_special_tokens=False).ids, eos]
            realigned += len(answer) != len(record["completion_logprobs"])
            record |= {"prompt_ids": ids, "completion_ids": answer}
    keys = [record["group_id"] for record in records]
    return _taught(_as_batch(records), keys, realigned)


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


def _from_shard(paths: RunPaths) -> tuple[Batch, list[str]]:
    index = Index(paths)
    index.refresh()
    rows = index.fresh_rows(policy_version=0, limit=1 << 20)
    names = ("start_group", "power", "phase")
    return index.gather(rows), [str(key) for key in zip(*(rows[name].to_pylist() for name in names), strict=True)]


def _tokenise_again(batch: Batch, tokenizer: Tokenizer) -> int:
    """Decode and encode every row, as a trainer that is given texts must; how many came out with another length."""
    changed = 0
    for start, end in zip(batch.input_offsets[:-1], batch.input_offsets[1:], strict=True):
        text = tokenizer.decode(batch.input_ids[start:end].tolist(), skip_special_tokens=False)
        changed += len(tokenizer.encode(text, add_special_tokens=False).ids) != end - start
    return changed


def _as_batch(records: Sequence[Mapping[str, Any]]) -> Batch:
    """Rows of JSON as the arrays that both trainers take; log-probabilities are cut or filled to the tokens."""
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
        advantage_groups=np.full(len(records), -1, np.int32),
        policy_versions=np.zeros(len(records), np.int32),
    )


def _taught(batch: Batch, keys: Sequence[str], realigned: int) -> Learnable:
    """The rows of groups of at least two with spread, numbered by group."""
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    groups = np.array([number[key] for key in keys], np.int32)
    kept = []
    for group in range(len(number)):
        members = np.flatnonzero(groups == group)
        if len(members) > 1 and batch.returns[members].var() > MIN_VARIANCE:
            kept.extend(members.tolist())
    return Learnable(batch=rows_of(batch, kept, groups), rows=len(keys), realigned=realigned)


def rows_of(batch: Batch, kept: Sequence[int], groups: np.ndarray) -> Batch:
    """`batch` of these rows alone; advantage groups are numbered anew, from 0."""
    inputs = [batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]] for row in kept]
    spans = [(batch.completion_offsets[row], batch.completion_offsets[row + 1]) for row in kept]
    legal = [batch.legal_ids[batch.legal_offsets[first] : batch.legal_offsets[last]] for first, last in spans]
    sizes = [np.diff(batch.legal_offsets[first : last + 1]) for first, last in spans]
    logprobs = [batch.behaviour_logprobs[first:last] for first, last in spans]
    _, renumbered = np.unique(groups[kept], return_inverse=True) if kept else (None, np.zeros(0, np.int64))
    none = np.zeros(0, np.int32)
    return Batch(
        decision_ids=batch.decision_ids[kept],
        input_ids=np.concatenate([none, *inputs]).astype(np.int32),
        input_offsets=offsets_of([len(ids) for ids in inputs]),
        prompt_lens=batch.prompt_lens[kept],
        behaviour_logprobs=np.concatenate([none, *logprobs]).astype(np.float32),
        completion_offsets=offsets_of([int(last - first) for first, last in spans]),
        legal_ids=np.concatenate([none, *legal]).astype(np.int32),
        legal_offsets=offsets_of(np.concatenate([none, *sizes]).astype(np.int64).tolist()),
        temperatures=batch.temperatures[kept],
        returns=batch.returns[kept],
        advantage_groups=renumbered.astype(np.int32),
        policy_versions=batch.policy_versions[kept],
    )
