"""Rows for the tests of storage: plausible decisions and phases, made from plain numbers."""

import json
import random
from typing import Any

from entente.records.rows import Decision, PlayedPhase, decision_id


def make_decision(rng: random.Random, producer: str = "p0", **given: Any) -> Decision:
    """A well-formed decision with a few random tokens; ``given`` replaces any field."""
    n_prompt, n_completion = rng.randint(1, 12), rng.randint(1, 8)
    legal_ids: list[int] = []
    legal_offsets = [0]
    for _ in range(n_completion):
        legal_ids += rng.sample(range(600), rng.choice([1, 1, 2, 5]))
        legal_offsets.append(len(legal_ids))
    place = {"start_group": 0, "fork": 0, "phase_index": 0, "power": "FRANCE"} | given
    fields: dict[str, Any] = {
        "decision_id": decision_id(producer, place["start_group"], place["fork"], place["phase_index"], place["power"]),
        "snapshot_id": f"{place['start_group']:016x}",
        "phase": "S1901M",
        "game_id": "game-7",
        "seed": rng.randrange(2**62),
        "opponents": "scripted:mover",
        "policy_version": 0,
        "worker": "worker-0",
        "adapter_hash": "ab" * 16,
        "input_ids": [rng.randrange(600) for _ in range(n_prompt + n_completion)],
        "prompt_len": n_prompt,
        "behaviour_logprobs": [-rng.randrange(64) / 16 for _ in range(n_completion)],
        "legal_ids": legal_ids,
        "legal_offsets": legal_offsets,
        "temperature": 1.0,
        "orders": ["A PAR - BUR", "F BRE H"],
        "centres_gained": float(rng.choice([-1, 0, 0, 1])),
        "sos_share": rng.randrange(-8, 8) / 32,
        "draw_share": rng.randrange(-8, 8) / 64,
        "survival": float(rng.choice([0, 0, -1])),
        "leader_gap": rng.randrange(-8, 8) / 32,
        "balance": rng.randrange(-8, 8) / 32,
        "units_dislodged": float(rng.choice([0, 0, 1])),
        "units_driven_out": float(rng.choice([0, 0, 1])),
        "orders_void": float(rng.randrange(3)),
        "orders_bounced": float(rng.randrange(3)),
        "orders_rejected": 0,
        "status": "complete",
        "reason": "",
        "ended": "horizon",
        "queue_ms": 1.5,
        "prefill_ms": 4.25,
        "decode_ms": 16.0,
        "engine_ms": 3.0,
        "cached_tokens": 32,
    }
    return Decision(**(fields | place))


def make_phase(**given: Any) -> PlayedPhase:
    """A phase whose texts are small but valid JSON."""
    fields: dict[str, Any] = {
        "start_group": 0,
        "fork": 0,
        "phase_index": 0,
        "phase": "S1901M",
        "snapshot_id": "0" * 16,
        "position": json.dumps({"map": "standard"}),
        "orders": json.dumps({"FRANCE": ["A PAR - BUR"]}),
        "results": json.dumps({"A PAR": []}),
    }
    return PlayedPhase(**(fields | given))


def make_shard_rows(
    rng: random.Random, start_groups: range, producer: str = "p0", forks: int = 3, **given: Any
) -> tuple[list[Decision], list[PlayedPhase]]:
    """Two powers over two phases of every fork of the start groups, and the phases."""
    decisions, phases = [], []
    for start_group in start_groups:
        for fork in range(forks):
            for phase_index, phase in enumerate(("S1901M", "F1901M")):
                place = {"start_group": start_group, "fork": fork, "phase_index": phase_index, "phase": phase}
                phases.append(make_phase(**place))
                decisions += [make_decision(rng, producer, power=power, **place, **given) for power in ("FRANCE", "TURKEY")]
    return decisions, phases
