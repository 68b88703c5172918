"""A file with the requests of real rollouts, so that an engine can be measured on a machine that plays no games.

Prompts are encoded with the general tokenizer that comes with vLLM: they are as long as for a large model. While recording, an
engine that takes no time draws random legal completions. A file holds whole start groups, in the order of a rollout.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from decoding.codec import Codec
from decoding.legal_table import LegalTable
from records.generation import GenerationRequest
from telemetry.errors import InputError

NOTATIONS = ("full", "slot")
EOS_KEY, VOCABULARY_KEY = b"eos_id", b"vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The content of a file."""

    by_notation: Mapping[str, Sequence[GenerationRequest]]
    """Requests in the order of the rollout, for each of NOTATIONS."""
    eos_id: int
    """End mark of the tables; the model that draws them must end its completions with it."""
    vocabulary: int
    """Size of the vocabulary; every token id is below it."""

    def requests(self, notation: str, *, label: str) -> list[GenerationRequest]:
        """The requests of one notation, with ids that begin with `label`."""
        return [
            replace(request, request_id=f"{label}/{number}") for number, request in enumerate(self.by_notation.get(notation, ()))
        ]


class GeneralCodec(Codec):
    """The codec of a general tokenizer of 131,072 tokens."""

    def __init__(self) -> None:
        from benchmarks.prompt_tokens import general_tokens

        self._tekken = general_tokens()
        self._prepare(eos_id=int(self._tekken.eos_id), vocabulary_size=int(self._tekken.n_words))

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without a mark of its beginning."""
        return tuple(self._tekken.encode(text, bos=False, eos=False))


def record(file: Path, *, groups: int, forks: int, years: int, seed: int) -> int:
    """Play `groups` start groups in each notation and write their requests; returns the number of requests."""
    from benchmarks.decode_cases import InstantEngine, played_positions, roll_out_group
    from game.prompt_settings import PromptSettings
    from rollouts.fork import Tokens

    codec, dice, rows = GeneralCodec(), random.Random(f"record {seed}"), []
    positions = played_positions(groups, seed)
    for notation in NOTATIONS:
        tokens = Tokens(codec, PromptSettings(order_notation=notation))
        for number, snapshot in enumerate(positions):
            drawn, _ = asyncio.run(roll_out_group(snapshot, InstantEngine(), tokens, number=number, forks=forks, years=years))
            rows += [
                {
                    "notation": notation,
                    "prompt_ids": np.asarray(request.prompt_ids, np.int32),
                    "table": request.table.to_bytes(),
                    "seed": dice.getrandbits(40),
                    "snapshot_id": request.snapshot_id,
                }
                for request, _ in drawn
            ]
    metadata = {EOS_KEY: str(codec.eos_id).encode(), VOCABULARY_KEY: str(codec.vocabulary_size).encode()}
    feather.write_feather(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), str(file), compression="zstd")
    return len(rows)


def read(file: Path) -> Recording:
    """Read a file that `record` wrote.

    Raises:
        InputError: the file is missing or is not a recording.
    """
    try:
        table = feather.read_table(str(file))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"'{file}' is no recording of requests: {error}") from error
    metadata = table.schema.metadata or {}
    if EOS_KEY not in metadata:
        raise InputError(f"'{file}' is no recording of requests: it names no end mark")
    tables: dict[bytes, LegalTable] = {}
    found: dict[str, list[GenerationRequest]] = {}
    for number, row in enumerate(table.to_pylist()):
        request = GenerationRequest(
            request_id=f"recorded/{number}",
            prompt_ids=row["prompt_ids"],
            table=tables.setdefault(row["table"], LegalTable.from_bytes(row["table"])),
            seed=row["seed"],
            snapshot_id=row["snapshot_id"],
        )
        found.setdefault(row["notation"], []).append(request)
    return Recording(by_notation=found, eos_id=int(metadata[EOS_KEY]), vocabulary=int(metadata[VOCABULARY_KEY]))
