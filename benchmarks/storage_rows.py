"""Random rows for the storage benchmark, with the sizes of real rollouts.

A prompt has 440 tokens (standard deviation 60), a completion 24 (8); ids follow Zipf's law. The forks of a start group share the
prompt of each power. A start group lags at most three policy versions. Rows of a long history have one token and are built as
columns: a million take seconds.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from entente.game.snapshot import POWERS
from entente.records.rows import Decision, PlayedPhase, decision_id
from storage.arrow_files import COMPONENTS, DECISION_SCHEMA, PHASE_SCHEMA, row_checksums

FORKS = 6
ROWS_PER_START_GROUP = FORKS * len(POWERS)
VERSIONS = 200
_TOKENS = 4096
_PHASE = "S1903M"
_SAME: dict[str, Any] = {
    "phase": _PHASE,
    "phase_index": 0,
    "opponents": "policy",
    "worker": "worker-0",
    "adapter_hash": "ab" * 16,
    "status": "complete",
    "reason": "",
    "ended": "horizon",
    "orders_rejected": 0,
}
_ONE_TOKEN: dict[str, Any] = {
    "input_ids": [7],
    "prompt_len": 1,
    "behaviour_logprobs": [],
    "legal_ids": [],
    "legal_offsets": [0],
    "orders": ["A PAR - BUR"],
}


def decisions_of(start_groups: range, seed: int) -> list[Decision]:
    rng = np.random.default_rng([seed, start_groups.start])
    made = []
    for start_group in start_groups:
        prompts = {power: _token_ids(rng, _around(rng, 440, 60)) for power in POWERS}
        for fork in range(FORKS):  # fork by fork, as in a rollout: rows of one advantage group are not adjacent
            for power, prompt in prompts.items():
                made.append(_decision(rng, prompt, start_group, fork, power))
    return made


def phases_of(start_groups: range) -> list[PlayedPhase]:
    texts = {"position": "{}", "orders": "{}", "results": "{}"}
    return [
        PlayedPhase(start_group=group, fork=fork, phase_index=0, phase=_PHASE, snapshot_id=f"{group:016x}", **texts)
        for group in start_groups
        for fork in range(FORKS)
    ]


def history(start_groups: range, all_groups: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """Decisions and phases of these start groups of a run with `all_groups` and versions from 0 to VERSIONS - 1."""
    rng, groups = np.random.default_rng([seed, start_groups.start]), np.array(start_groups, np.int64)
    n = len(groups) * ROWS_PER_START_GROUP
    newest = groups * (VERSIONS - 1) // max(1, all_groups - 1)
    version = np.maximum(np.repeat(newest - rng.integers(0, 4, len(groups)), ROWS_PER_START_GROUP), 0)
    columns = {
        "decision_id": pa.array(groups[0] * ROWS_PER_START_GROUP + np.arange(n, dtype=np.int64) + 1),
        "start_group": pa.array(np.repeat(groups, ROWS_PER_START_GROUP)),
        "snapshot_id": _ids(np.repeat(groups, ROWS_PER_START_GROUP)),
        "fork": pa.array(np.tile(np.arange(FORKS), n // FORKS).astype(np.int16)),
        "power": pa.array(np.array(sorted(POWERS), object)).take(pa.array(np.arange(n) // FORKS % len(POWERS))),
        "policy_version": pa.array(version.astype(np.int32)),
        "seed": pa.array(rng.integers(0, 2**62, n)),
        "game_id": _ids(np.repeat(groups // 8, ROWS_PER_START_GROUP)),
    }
    columns |= {name: pa.array(rng.integers(-2, 3, n).astype(np.float32)) for name in COMPONENTS}
    decisions = _table(columns, DECISION_SCHEMA)
    place = DECISION_SCHEMA.get_field_index("checksum")
    sums = pa.array(row_checksums(decisions), pa.uint32())
    phases = {
        "start_group": pa.array(np.repeat(groups, FORKS)),
        "fork": pa.array(np.tile(np.arange(FORKS, dtype=np.int16), len(groups))),
        "snapshot_id": _ids(np.repeat(groups, FORKS)),
    }
    return decisions.set_column(place, DECISION_SCHEMA.field(place), sums), _table(phases, PHASE_SCHEMA)


def _table(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    n = len(columns["start_group"])
    same = _SAME | (_ONE_TOKEN if schema is DECISION_SCHEMA else dict.fromkeys(("position", "orders", "results"), "{}"))
    filled = [
        columns[field.name].cast(field.type) if field.name in columns else pa.array([same.get(field.name, 1)] * n, field.type)
        for field in schema
    ]
    return pa.table(filled, schema=schema)


def _ids(numbers: np.ndarray) -> pa.Array:
    """Numbers as id strings. Formats each distinct number once, because ten million Python strings take a gigabyte."""
    distinct, place = np.unique(numbers, return_inverse=True)
    return pa.array([f"{number:016x}" for number in distinct.tolist()]).take(pa.array(place))


def _decision(rng: np.random.Generator, prompt: np.ndarray, start_group: int, fork: int, power: str) -> Decision:
    length = _around(rng, 24, 8)
    widths = rng.choice([1, 1, 2, 5], length)
    return Decision(
        decision_id=decision_id("bench", start_group, fork, 0, power),
        snapshot_id=f"{start_group:016x}",
        game_id=f"{start_group // 8:016x}",
        seed=int(rng.integers(0, 2**62)),
        policy_version=0,
        input_ids=np.concatenate([prompt, _token_ids(rng, length)]),
        prompt_len=len(prompt),
        behaviour_logprobs=-rng.random(length, np.float32),
        legal_ids=_token_ids(rng, int(widths.sum())),
        legal_offsets=np.concatenate([[0], np.cumsum(widths)]).astype(np.int32),
        temperature=1.0,
        orders=["A PAR - BUR", "F BRE H"],
        queue_ms=1.5,
        prefill_ms=4.25,
        decode_ms=16.0,
        engine_ms=3.0,
        cached_tokens=32,
        **dict(zip(COMPONENTS, rng.integers(-2, 3, len(COMPONENTS)).astype(float).tolist(), strict=True)),
        start_group=start_group,
        fork=fork,
        power=power,
        **_SAME,
    )


def _token_ids(rng: np.random.Generator, length: int) -> np.ndarray:
    return (rng.zipf(1.3, length) % _TOKENS).astype(np.int32)


def _around(rng: np.random.Generator, middle: float, deviation: float) -> int:
    return max(2, round(rng.normal(middle, deviation)))
