"""Checks the legal table of a vLLM request at admission, and caches checked tables.

Tables travel in `SamplingParams.extra_args` as base64 text, because requests are JSON. Forks of a position send the same text, so
each is checked once. An exception in the engine's loop would leave the request unfinished forever.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

import binascii
from base64 import b64decode, b64encode
from functools import lru_cache
from typing import TYPE_CHECKING

from entente.decoding.legal_table import END, LegalTable
from entente.telemetry.errors import DataError

if TYPE_CHECKING:
    from vllm import SamplingParams

TABLE_KEY = "legal_table"
START_KEY = "legal_start"
"""Key of the table's node at which the first token is sampled; 0: the table's start. The prompt has the forced tokens before."""
SAMPLING_KEY = "legal_sampling"
"""Key of our V1 processor's seed and temperature; vLLM's temperature must then be 0. Without it vLLM samples under the mask."""

_HOTTEST = 1e30


def encode_table(table: LegalTable) -> str:
    return b64encode(table.to_bytes()).decode()


@lru_cache(maxsize=4096)
def decode_table(text: str) -> LegalTable:
    """The checked table of `text`; the same object each time. Raises DataError for a text that is none."""
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{TABLE_KEY} is not base64 ({error})") from error
    return LegalTable.from_bytes(data)


def admit(parameters: "SamplingParams", vocabulary_size: int | None) -> None:
    """Raise ValueError (the type of vLLM's `validate_params`) for an invalid table, tokens outside the vocabulary (None:
    unknown), too small a `max_tokens`, or a thought that may contain a token at which vLLM stops."""
    text = (parameters.extra_args or {}).get(TABLE_KEY)
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"{TABLE_KEY} must be base64 text, not {type(text).__name__}")
    try:
        table = decode_table(text)
    except DataError as error:
        raise ValueError(str(error)) from error
    if vocabulary_size is not None and table.largest_id >= vocabulary_size:
        raise ValueError(f"legal table allows token {table.largest_id} outside the vocabulary of {vocabulary_size}")
    if table.thought is not None:
        stops = {*(parameters.stop_token_ids or ())}.difference(table.thought.excluded)
        if stops or not parameters.ignore_eos:
            raise ValueError(f"a thought may contain any token but {table.thought.excluded}, so no other may stop the request")
    head, after = table.forced(table.start)
    start = start_node(parameters)
    if type(start) is not int or start not in (0, after) or start == END:
        raise ValueError(f"{START_KEY} must be 0 or {after}, where the table's first choice is, not {start!r}")
    longest = table.longest - (len(head) if start else 0)
    sampling = (parameters.extra_args or {}).get(SAMPLING_KEY)
    if sampling is not None and (sampling_of(parameters) is None or parameters.temperature):
        raise ValueError(
            f"{SAMPLING_KEY} must be a seed of 63 bits and a temperature above 0, beside vLLM's temperature 0: {sampling!r}"
        )
    if parameters.max_tokens is not None and parameters.max_tokens < longest:
        raise ValueError(f"max_tokens {parameters.max_tokens} would cut a completion of {longest} tokens")


def start_node(parameters: "SamplingParams") -> int:
    return (parameters.extra_args or {}).get(START_KEY, 0)


def sampling_of(parameters: "SamplingParams") -> tuple[int, float] | None:
    """Seed and temperature of a request that our processor samples; None if vLLM samples it, or if they are missing."""
    match (parameters.extra_args or {}).get(SAMPLING_KEY):
        case [int(seed), int() | float() as temperature] if 0 <= seed < 2**63 and 0 < temperature < _HOTTEST:
            return seed, float(temperature)
    return None


def admitted_table(parameters: "SamplingParams", vocabulary_size: int) -> LegalTable | None:
    """The table of a request already in the engine, if any; never raises. One beyond the vocabulary, whose size admission may not
    know, is dropped: the request runs unconstrained, and the client rejects its completion as illegal."""
    text = (parameters.extra_args or {}).get(TABLE_KEY)
    try:
        table = None if text is None else decode_table(text)
    except (DataError, TypeError):
        return None
    return None if table is None or table.largest_id >= vocabulary_size else table
