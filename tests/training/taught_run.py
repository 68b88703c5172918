"""Distillation targets for the rows of a run: the answers of the forks at one position are the proposals of a random teacher."""

import json
import random
from itertools import groupby, pairwise

import numpy as np

from entente.records.distil_target import DistilTarget, distil_target_id
from storage.distil_targets import publish_distil_targets
from storage.runs import RunPaths
from storage.shards import open_shard, shard_path


def distil_targets_of(paths: RunPaths, seed: int = 3) -> list[DistilTarget]:
    """One distillation target for each position where the forks of the run's first shard gave at least two different answers."""
    shard, rng, found = shard_path(paths, "local", 0), random.Random(seed), []
    rows = open_shard(shard).to_pylist()

    def position(row: dict) -> str:
        return json.dumps([row["start_group"], row["phase"], row["power"], row["input_ids"][: row["prompt_len"]]])

    for _, forks in groupby(sorted(rows, key=position), key=position):
        answers = {json.dumps(row["input_ids"]): row for row in forks}.values()
        if len(answers) < 2:
            continue
        first = next(iter(answers))
        completions = [row["input_ids"][row["prompt_len"] :] for row in answers]
        sets = [
            row["legal_ids"][begin:end] for row in answers for begin, end in pairwise(row["legal_offsets"])
        ]  # position after position, answer after answer
        weights = np.array([rng.random() for _ in answers])
        weights /= weights.sum()
        found.append(
            DistilTarget(
                distil_target_id=distil_target_id("r", first["decision_id"]),
                decision_id=first["decision_id"],
                source=f"local/{shard.name}",
                snapshot_id=first["snapshot_id"],
                phase=first["phase"],
                power=first["power"],
                policy_version=first["policy_version"],
                adapter_hash=first["adapter_hash"],
                temperature=1.0,
                teacher="dice",
                prompt_ids=first["input_ids"][: first["prompt_len"]],
                completion_ids=[token for each in completions for token in each],
                completion_offsets=[0, *np.cumsum([len(each) for each in completions]).tolist()],
                legal_ids=[token for each in sets for token in each],
                legal_offsets=[0, *np.cumsum([len(each) for each in sets]).tolist()],
                orders=["; ".join(row["orders"]) for row in answers],
                probabilities=weights.tolist(),
                values=weights.tolist(),
                visits=[1] * len(weights),
            )
        )
    return found


def publish(paths: RunPaths, each: int = 4) -> int:
    """Publish the distillation targets of a run as round "r", `each` in a file; returns their number."""
    distil_targets = distil_targets_of(paths)
    for first in range(0, len(distil_targets), each):
        assert publish_distil_targets(paths, "r", first, distil_targets[first : first + each], {})
    return len(distil_targets)


def count(paths: RunPaths) -> int:
    """Number of distillation targets that `publish` published."""
    return len(distil_targets_of(paths))
