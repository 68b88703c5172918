"""The process of a candidate of the tuner, and the requests that all candidates draw.

    python -m pipeline.tuning_candidate JOB      measures one candidate (telemetry/child.py)

A recorded decision becomes a chain of its legal sets, so that all candidates draw the same number of tokens under the same masks.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from decoding.legal_table import END, LegalTable
from decoding.model_files import eos_token_id
from decoding.open_set import excluded_ids, open_sets
from decoding.thinking import ThoughtRule
from inference.engine import Engine, forget_prefixes
from inference.settings import InferenceSettings
from records.generation import GenerationRequest
from records.policy_version import PolicyVersion
from storage.files import folders_in, names_in
from storage.runs import RunPaths
from storage.schema import as_array
from storage.shards import SHARD_NAME, open_shard
from telemetry.child import answer_job
from telemetry.errors import DataError, InputError

WARM_UP = 16
"""Requests before the first pass."""


def recorded_rows(paths: RunPaths, most: int) -> list[dict[str, Any]]:
    """Prompts and legal sets of a run's newest decisions, in the order of rollouts: by ply, then start group, then fork.

    Raises:
        InputError: the run has no decisions.
    """
    found: list[dict[str, Any]] = []
    shards = [
        paths.shards / producer / name
        for producer in folders_in(paths.shards)
        for name in names_in(paths.shards / producer)
        if SHARD_NAME.fullmatch(name)
    ]
    for shard in sorted(shards, key=lambda path: path.stem, reverse=True):
        try:
            found += _rows(open_shard(shard))
        except DataError:
            continue  # other shards are enough; the run itself reports a damaged one
        if len(found) >= most:
            break
    if not found:
        raise InputError(f"'{paths.root}' has no decisions to tune on: name a run that played")
    return found[:most]


def _rows(decisions: pa.Table) -> list[dict[str, Any]]:
    order = decisions.sort_by([(name, "ascending") for name in ("ply", "start_group", "fork")])
    single = {name: order[name].to_pylist() for name in ("prompt_len", "seed", "snapshot_id")}
    lists = {}
    for name in ("input_ids", "legal_ids", "legal_offsets"):
        column = as_array(order[name])
        lists[name] = [ids.tolist() for ids in np.split(column.values.to_numpy(), column.offsets.to_numpy()[1:-1])]
    return [
        {
            "prompt_ids": lists["input_ids"][row][: single["prompt_len"][row]],
            "legal_ids": lists["legal_ids"][row],
            "legal_offsets": lists["legal_offsets"][row],
            "seed": single["seed"][row],
            "snapshot_id": single["snapshot_id"][row],
        }
        for row in range(order.num_rows)
    ]


def chain_table(legal_ids: Sequence[int], legal_offsets: Sequence[int], eos: int) -> LegalTable:
    """A table whose position i has the recorded legal set, and whose tokens all lead to position i + 1.

    All candidates therefore draw the same number of tokens under the same masks. The end mark is the only token of the last
    position and legal nowhere else. Only a thought may be shorter: the token after it, which ends it, may be drawn in it.

    Raises:
        DataError: the sets do not end with the end mark.
    """
    bounds = np.asarray(legal_offsets)
    thought = int(np.count_nonzero(open_sets(np.asarray(legal_ids), bounds)))  # its sets come first
    rule = None
    if thought:
        rule = ThoughtRule(budget=thought, end=int(legal_ids[1]), excluded=int(excluded_ids(np.asarray(legal_ids[:1]))[0]))
    last = len(bounds) - 2 - thought
    sets = []
    for place, (first, after) in enumerate(pairwise(bounds[thought:].tolist())):
        ids = legal_ids[first:after]
        others = [token for token in ids if token != eos]
        sets.append([eos] if place == last else others)
        if (place == last and eos not in ids) or (place < last and not others):
            raise DataError(f"the legal sets of a recorded decision do not end where their end mark {eos} is: of another model?")
    sizes = np.array([len(ids) for ids in sets])
    table = LegalTable(
        offsets=np.append(0, np.cumsum(sizes)).astype(np.int32),
        token_ids=np.array([token for ids in sets for token in ids], np.int32),
        next_nodes=np.repeat(np.append(np.arange(1, last + 1), END), sizes).astype(np.int32),
        longest=thought + last + 1,
        thought=rule,
    )
    return LegalTable.from_bytes(table.to_bytes())


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of a job, draw its requests several times with the adapter, and return the figures."""
    return asyncio.run(_measure(job))


async def _measure(job: dict[str, Any]) -> dict[str, Any]:
    from inference.choose_engine import choose_engine, engine_here

    settings, model = InferenceSettings.model_validate(job["settings"]), Path(job["model"])
    eos, began = eos_token_id(model), time.perf_counter()
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=row["prompt_ids"],
            table=chain_table(row["legal_ids"], row["legal_offsets"], eos),
            seed=row["seed"],
            snapshot_id=row["snapshot_id"],
        )
        for number, row in enumerate(json.loads(Path(job["requests"]).read_text()))
    ]
    engine = choose_engine(settings, model, name="candidate")
    await engine.start()
    start_s = time.perf_counter() - began
    version = 0
    if job["policy"]:
        await engine.publish(replace(PolicyVersion.from_json(job["policy"]), version=1))
        version = 1
    asked = [replace(each, version=version) for each in requests]
    await one_pass(engine, asked[:WARM_UP], "warm-up", settings.max_in_flight)
    passes = [await one_pass(engine, asked, f"pass-{number}", settings.max_in_flight) for number in range(job["rounds"])]
    rates = [len(each["latency_ms"]) / each["seconds"] for each in passes]
    latencies = [latency for each in passes for latency in each["latency_ms"]]
    return {
        "engine": engine_here(settings)[0],
        "start_s": start_s,
        "decisions_per_s": median(rates),
        "tokens_per_s": median(each["tokens"] / each["seconds"] for each in passes),
        "latency_ms_p99": float(np.quantile(latencies, 0.99)),
        "first_token_ms": float(np.mean([first for each in passes for first in each["first_token_ms"]])),
        "cache_hit": sum(each["cached"] for each in passes) / sum(each["prompt"] for each in passes),
        "spread": (max(rates) - min(rates)) / median(rates),
    }


async def one_pass(engine: Engine, requests: Sequence[GenerationRequest], label: str, in_flight: int) -> dict[str, Any]:
    """Draw all requests, `in_flight` at a time, from an empty prefix cache."""
    await forget_prefixes(engine)
    limit = asyncio.Semaphore(in_flight)
    found: dict[str, Any] = {"latency_ms": [], "first_token_ms": [], "prompt": 0, "cached": 0, "tokens": 0}

    async def ask(request: GenerationRequest) -> None:
        async with limit:
            began = time.perf_counter()
            drawn = await engine.generate(replace(request, request_id=f"{label}/{request.request_id}"))
            found["latency_ms"].append(1e3 * (time.perf_counter() - began))
        found["first_token_ms"].append(drawn.cost.queue_ms + drawn.cost.prefill_ms)
        found["prompt"] += len(request.prompt_ids)
        found["cached"] += drawn.cost.cached_tokens
        found["tokens"] += len(drawn.token_ids)

    began = time.perf_counter()
    await asyncio.gather(*(ask(each) for each in requests))
    return found | {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    answer_job(measure)
