"""The requests of the candidates, recorded or random, in one file that each candidate's process reads.

A recorded decision becomes a chain: each position has the recorded legal set, and every token of it leads to the next position.
All candidates therefore draw the same number of tokens under the same masks.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from decoding.legal_table import END, LegalTable
from decoding.model_files import eos_token_id
from decoding.open_set import excluded_ids, open_sets
from decoding.thinking import ThoughtRule
from records.generation import GenerationRequest
from telemetry.errors import DataError, InputError
from tuning.settings import TuneSettings

LEGAL_IDS = 8
"""Size of a legal set of a random request."""
SCHEMA = pa.schema(
    [
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("legal_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("legal_offsets", pa.list_(pa.int32()), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("snapshot_id", pa.string(), nullable=False),
    ]
)
"""Columns of a file of requests, one row for each, in the order of drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRow:
    """One request."""

    prompt_ids: Sequence[int]
    legal_ids: Sequence[int]
    """Token ids allowed, position after position."""
    legal_offsets: Sequence[int]
    """[positions + 1] position i allows legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""
    seed: int
    """Seed of the draws."""
    snapshot_id: str = ""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.legal_offsets) - 1


def random_rows(model: Path, tuning: TuneSettings, *, max_model_length: int) -> list[AskedRow]:
    """Random requests with the lengths and the shared prefix of the settings.

    Raises:
        InputError: they are longer than the engine accepts.
    """
    prompt, completion = tuning.random_prompt_tokens, tuning.random_completion_tokens
    check_shape(tuning, max_model_length=max_model_length)
    vocabulary, eos = vocabulary_size(model), eos_token_id(model)
    dice = random.Random(f"tuning {tuning.seed}")
    ordinary = [token for token in range(vocabulary) if token != eos]
    shared = round(tuning.random_shared * prompt)
    common = dice.choices(ordinary, k=shared)
    rows = []
    for _ in range(tuning.asked):
        legal = [sorted(dice.sample(ordinary, min(LEGAL_IDS, len(ordinary)))) for _ in range(completion - 1)]
        rows.append(
            AskedRow(
                prompt_ids=common + dice.choices(ordinary, k=prompt - shared),
                legal_ids=[token for ids in legal for token in ids] + [eos],
                legal_offsets=np.cumsum([0, *map(len, legal), 1]).tolist(),
                seed=dice.getrandbits(40),
            )
        )
    return rows


def check_shape(tuning: TuneSettings, *, max_model_length: int) -> None:
    """Check the length of random requests.

    Raises:
        InputError: they are longer than the engine accepts.
    """
    prompt, completion = tuning.random_prompt_tokens, tuning.random_completion_tokens
    if prompt + completion > max_model_length:
        raise InputError(
            f"random requests of {prompt} prompt and {completion} completion tokens exceed inference.max_model_length "
            f"{max_model_length}: lower random_prompt_tokens or random_completion_tokens, or name a run"
        )


def vocabulary_size(model: Path) -> int:
    """Vocabulary size of the model in `model`.

    Raises:
        InputError: its config does not contain it.
    """
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{model / 'config.json'}' does not tell vocab_size: random requests need it") from error


def as_table(rows: Iterable[AskedRow]) -> pa.Table:
    """The rows as a table of SCHEMA."""
    listed = list(rows)
    columns = {field.name: pa.array([getattr(row, field.name) for row in listed], field.type) for field in SCHEMA}
    return pa.table(columns, SCHEMA)


def read_requests(file: Path, model: Path) -> list[GenerationRequest]:
    """The requests of a file, for the model in `model`.

    Raises:
        DataError: the file is damaged, or was made for another model.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
            rows = reader.read_all().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{file}' is no whole file of requests ({error}): remove it") from error
    eos = eos_token_id(model)
    return [
        GenerationRequest(
            request_id=f"tuning/{number}",
            prompt_ids=row["prompt_ids"],
            table=chain_table(row["legal_ids"], row["legal_offsets"], eos),
            seed=row["seed"],
            snapshot_id=row["snapshot_id"],
        )
        for number, row in enumerate(rows)
    ]


def chain_table(legal_ids: Sequence[int], legal_offsets: Sequence[int], eos: int) -> LegalTable:
    """A table whose position i has the recorded legal set, and whose tokens all lead to position i + 1.

    The end mark is the only token of the last position and legal nowhere else, so that every draw has the same length. Only a
    thought may be shorter: the token after it, which ends it, may be drawn in it.

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
