"""Requests of real rollouts as a file, so that an engine can be measured where no game is played.

Recorded with the general tokenizer that vLLM brings, whose prompts are as long as a large model's; an engine that takes no time
draws, so that forks part. A file holds whole start groups in the order in which a rollout asked.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from decoding.codec import ORDER_SEPARATOR, Codec
from decoding.legal_table import LegalTable
from records.generation import GenerationRequest
from telemetry.errors import InputError

EOS_KEY, VOCABULARY_KEY = b"eos_id", b"vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded decision."""

    notation: str
    """'full' or 'slot'."""
    group: int
    """Start group within its notation."""
    ply: int
    """Phases since the fork."""
    request: GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a file holds."""

    decisions: list[Recorded]
    eos_id: int
    """The end mark of its tables; a model that draws them must end its completions with it."""
    vocabulary: int
    """Ids are below this."""

    def requests(self, notation: str, *, group: int | None = None, label: str) -> list[GenerationRequest]:
        """Requests of one notation, of one group or all, in their order, under names of their own."""
        found = [each for each in self.decisions if each.notation == notation and group in (None, each.group)]
        return [renamed(each.request, f"{label}/{number}") for number, each in enumerate(found)]

    def plies(self, notation: str, group: int, *, label: str) -> list[list[GenerationRequest]]:
        """Requests of one group, ply by ply."""
        found = [each for each in self.decisions if (each.notation, each.group) == (notation, group)]
        plies = sorted({each.ply for each in found})
        return [[renamed(each.request, f"{label}/{ply}/{n}") for n, each in enumerate(found) if each.ply == ply] for ply in plies]


def renamed(request: GenerationRequest, request_id: str) -> GenerationRequest:
    """The same request under another name."""
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=request.prompt_ids,
        table=request.table,
        seed=request.seed,
        snapshot_id=request.snapshot_id,
    )


class GeneralCodec(Codec):
    """The codec of a general tokenizer of 131,072 tokens."""

    def __init__(self) -> None:
        from benchmarks.prompt_tokens import general_tokens

        self._tekken = general_tokens()
        self.eos_id = int(self._tekken.eos_id)
        (self.separator_id,) = self._encode(ORDER_SEPARATOR)
        self.vocabulary_size = int(self._tekken.n_words)
        self._encode_segment = lru_cache(maxsize=1024)(self._encode)
        self.encode_order = lru_cache(maxsize=32768)(self._encode_order)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tekken.encode(text, bos=False, eos=False))


def record(file: Path, *, groups: int, forks: int, years: int, seed: int) -> int:
    """Play `groups` start groups in each notation and write their requests; how many."""
    from benchmarks.decode_cases import Instant, played_positions, roll_out_group
    from game.prompt_settings import PromptSettings
    from rollouts.fork import Tokens

    codec, dice, rows = GeneralCodec(), random.Random(f"record {seed}"), []
    positions = played_positions(groups, seed)
    for notation in ("full", "slot"):
        tokens = Tokens(codec, PromptSettings(order_notation=notation))
        for number, snapshot in enumerate(positions):
            drawn, _ = asyncio.run(roll_out_group(snapshot, Instant(), tokens, number=number, forks=forks, years=years))
            rows += [
                {
                    "notation": notation,
                    "group": number,
                    "ply": int(request.request_id.split("/")[-2]),
                    "prompt_ids": np.asarray(request.prompt_ids, np.int32),
                    "table": request.table.to_bytes(),
                    "seed": dice.getrandbits(40),
                    "snapshot_id": request.snapshot_id,
                }
                for request, _ in drawn
            ]
    about = {EOS_KEY: str(codec.eos_id).encode(), VOCABULARY_KEY: str(codec.vocabulary_size).encode()}
    feather.write_feather(pa.Table.from_pylist(rows).replace_schema_metadata(about), str(file), compression="zstd")
    return len(rows)


def read(file: Path) -> Recording:
    """What `record` wrote.

    Raises:
        InputError: the file is not there, or is no recording.
    """
    try:
        table = feather.read_table(str(file))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"'{file}' is no recording of requests: {error}") from error
    about = table.schema.metadata or {}
    if EOS_KEY not in about:
        raise InputError(f"'{file}' is no recording of requests: it names no end mark")
    tables: dict[bytes, LegalTable] = {}
    decisions = [
        Recorded(notation=row["notation"], group=row["group"], ply=row["ply"], request=_request(row, number, tables))
        for number, row in enumerate(table.to_pylist())
    ]
    return Recording(decisions=decisions, eos_id=int(about[EOS_KEY]), vocabulary=int(about[VOCABULARY_KEY]))


def _request(row: dict, number: int, tables: dict[bytes, LegalTable]) -> GenerationRequest:
    table = tables.setdefault(row["table"], LegalTable.from_bytes(row["table"]))
    return GenerationRequest(
        request_id=f"recorded/{number}",
        prompt_ids=row["prompt_ids"],
        table=table,
        seed=row["seed"],
        snapshot_id=row["snapshot_id"],
    )


def alike(
    requests: Sequence[GenerationRequest], count: int, dice: random.Random, *, shared: int, own: int
) -> list[GenerationRequest]:
    """`count` requests with tables of `requests` and prompts of `shared` common and `own` random tokens each.

    Almost nothing is left to prefill once the common part is cached: what is timed with them is drawing.
    """
    common = [7 + place % 499 for place in range(shared)]
    return [
        GenerationRequest(
            request_id=f"alike/{dice.getrandbits(60):x}",
            prompt_ids=common + [dice.randrange(500, 1000) for _ in range(own)],
            table=requests[dice.randrange(len(requests))].table,
            seed=dice.getrandbits(40),
        )
        for _ in range(count)
    ]
