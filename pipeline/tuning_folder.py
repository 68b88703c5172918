"""The folder of a tuning run: requests from a run's shards, and results as Arrow files.

The name of a result file follows from the candidate's values, so a second run finds it. A result file is complete or absent. A
folder belongs to one set of requests and shared settings; with others it is refused.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.arrow_files import metadata_of, read_arrow, write_arrow
from storage.files import FILES
from storage.runs import RunPaths, durable_write
from storage.schema import as_array
from storage.shards import SHARD_NAME, open_shard
from telemetry.errors import DataError, InputError
from tuning.candidates import Candidate
from tuning.figures import FIGURES, ArmFigures
from tuning.job import Measured
from tuning.requests import AskedRow, as_table

IDENTITY_FILE, REQUESTS_FILE = "tuning.json", "requests.arrow"
CANDIDATES, LOGS = "candidates", "logs"


def recorded_rows(paths: RunPaths, most: int, *, max_model_length: int) -> list[AskedRow]:
    """Prompts and legal sets of a run's newest decisions, in the order of rollouts: by ply, then fork.

    Args:
        most: number of rows at most.
        max_model_length: longest allowed row, tokens.

    Raises:
        InputError: the run has no rows, or a row is too long.
    """
    found: list[tuple[tuple[int, ...], AskedRow]] = []
    shards = [
        paths.shards / producer / name
        for producer in FILES.folders(paths.shards)
        for name in FILES.names(paths.shards / producer)
        if SHARD_NAME.fullmatch(name)
    ]
    for number, shard in enumerate(sorted(shards, key=lambda path: path.stem, reverse=True)):
        try:
            found += [((number, *place), row) for place, row in _rows(open_shard(shard))]
        except DataError:
            continue  # other shards are enough; the run itself reports a damaged one
        if len(found) >= most:
            break
    if not found:
        raise InputError(
            f"'{paths.root}' has no decisions to tune on: name a run that played, or leave --run out for random ones"
        )
    rows = [row for _, row in islice(sorted(found, key=lambda pair: pair[0]), most)]
    if (longest := max(row.length for row in rows)) > max_model_length:
        raise InputError(
            f"the run's decisions have up to {longest} tokens, but inference.max_model_length is {max_model_length}: raise it"
        )
    return rows


def _rows(decisions: pa.Table) -> list[tuple[tuple[int, int, int], AskedRow]]:
    """Rows of a shard, each with its sort key (ply, start group, fork)."""
    single = {name: decisions[name].to_pylist() for name in ("ply", "fork", "start_group", "prompt_len", "seed", "snapshot_id")}
    lists = {}
    for name in ("input_ids", "legal_ids", "legal_offsets"):
        column = as_array(decisions[name])
        lists[name] = np.split(column.values.to_numpy(), column.offsets.to_numpy()[1:-1])
    return [
        (
            (single["ply"][row], single["start_group"][row], single["fork"][row]),
            AskedRow(
                prompt_ids=lists["input_ids"][row][: single["prompt_len"][row]],
                legal_ids=lists["legal_ids"][row],
                legal_offsets=lists["legal_offsets"][row],
                seed=single["seed"][row],
                snapshot_id=single["snapshot_id"][row],
            ),
        )
        for row in range(decisions.num_rows)
    ]


def claim_folder(folder: Path, identity: dict[str, Any], rows: Callable[[], list[AskedRow]]) -> Path:
    """Make or reuse the folder for these results. Returns its file of requests.

    Args:
        identity: what all results in the folder have in common.
        rows: returns the requests; called if the folder has none yet.

    Raises:
        InputError: the folder contains results for another identity, or something else.
    """
    file, requests = folder / IDENTITY_FILE, folder / REQUESTS_FILE
    identity = json.loads(json.dumps(identity))
    if file.is_file():
        try:
            before = json.loads(file.read_bytes())
        except ValueError as error:
            raise InputError(f"'{file}' cannot be read ({error}): give another --output") from error
        for name in sorted({*before, *identity}):
            if before.get(name) != identity.get(name):
                raise InputError(
                    f"'{folder}' has results for {name.replace('_', ' ')} {_shortened(before.get(name))}, not "
                    f"{_shortened(identity.get(name))}: give another --output, or remove the folder"
                )
    elif folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise InputError(f"'{folder}' is not a folder of tuning results: give another --output")
    if not requests.is_file():
        write_arrow(as_table(rows()), requests, {})
    durable_write(file, json.dumps(identity, indent=1).encode())
    return requests


def _shortened(value: Any) -> str:
    return json.dumps(value)[:120]


def write_result(folder: Path, candidate: Candidate, measured: Measured, name: str = "") -> None:
    """Write a candidate's result. Replaces an earlier result.

    Args:
        name: name of the file without suffix; empty: the candidate's key.
    """
    file = folder / CANDIDATES / f"{name or candidate.key}.arrow"
    FILES.remove(file)
    arms = list(measured.arms.items())
    columns: dict[str, pa.Array] = {"arm": pa.array([arm for arm, _ in arms], pa.string())}
    for name, value in candidate.values.items():
        # Checksums of a file cover whole bytes, but Arrow stores a boolean as one bit.
        plain = int(value) if isinstance(value, bool) else value
        columns[name] = pa.array([plain] * len(arms), _kind(plain))
    for name in FIGURES:
        columns[name] = pa.array([float(getattr(figures, name)) for _, figures in arms], pa.float64())
    columns["e2el_ms"] = pa.array([list(figures.e2el_ms) for _, figures in arms], pa.list_(pa.float64()))
    facts = {name: str(value) for name, value in asdict(replace(measured, arms={})).items() if name != "arms"}
    write_arrow(pa.table(columns), file, facts | {"candidate": json.dumps(candidate.values)})


def read_result(folder: Path, candidate: Candidate, name: str = "") -> Measured | None:
    """A candidate's result; None if there is no complete one. `name`: see `write_result`."""
    file = folder / CANDIDATES / f"{name or candidate.key}.arrow"
    try:
        table = read_arrow(file)
    except DataError:
        return None
    facts, arms = metadata_of(table), {}
    for row in table.to_pylist():
        figures = {name: row[name] for name in FIGURES}
        figures["requests"] = int(figures["requests"])
        arms[row["arm"]] = ArmFigures(**figures, e2el_ms=tuple(row["e2el_ms"]))
    words = {name: facts[name] for name in ("state", "reason", "log", "engine", "adapters")}
    numbers = {name: float(facts.get(name, 0.0)) for name in ("start_s", "seconds", "cpu_s")}
    return Measured(**words, **numbers, arms=arms)  # type: ignore[arg-type]


def _kind(value: Any) -> pa.DataType:
    return pa.int64() if isinstance(value, int) else pa.float64() if isinstance(value, float) else pa.string()
