"""What is checked of a request's legal table before an engine may see it, and where checked tables are kept.

A table travels to vLLM as bytes, in `SamplingParams.extra_args`. Forks of a position send the same bytes, and in one process
sender and engine are the same program: each table is therefore read and checked once, and known by its bytes from then on.
Whatever is wrong with it is said here, at admission; an exception inside the engine's loop would leave its request unfinished
for ever.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from decoding.legal_table import END, LegalTable
from telemetry.errors import DataError

if TYPE_CHECKING:
    from vllm import SamplingParams

TABLE_KEY = "legal_table"
"""Where a request's table travels, as bytes, in `SamplingParams.extra_args`."""
START_KEY = "legal_start"
"""Where the node travels at which its first token is drawn, if that is not the table's first: what must be said up to there
stands in the prompt already."""


class KnownTables:
    """Checked tables by their bytes; bounded, the longest unused goes first."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._tables: OrderedDict[bytes, LegalTable] = OrderedDict()

    def keep(self, table: LegalTable) -> bytes:
        """The bytes of `table`, under which `find` gives this very object back, unless it has yet to be checked."""
        data = table.to_bytes()
        if table.is_sound:
            self._put(data, table)
        return data

    def find(self, data: bytes) -> LegalTable:
        """The table spelled by `data`.

        Raises:
            DataError: it is not a table.
        """
        table = self._tables.get(data)
        if table is None:
            table = LegalTable.from_bytes(data)
        self._put(data, table)
        return table

    def _put(self, data: bytes, table: LegalTable) -> None:
        self._tables[data] = table
        self._tables.move_to_end(data)
        if len(self._tables) > self._size:
            self._tables.popitem(last=False)


known_tables = KnownTables()
"""The tables of this process."""


def admit(parameters: "SamplingParams", vocabulary_size: int | None) -> None:
    """Refuse a request whose table is none, leaves the vocabulary (where its size is known), or could be cut.

    Raises:
        ValueError: as vLLM asks of `validate_params`; the sentence says which rule is broken.
    """
    data = (parameters.extra_args or {}).get(TABLE_KEY)
    if data is None:
        return
    if not isinstance(data, bytes):
        raise ValueError(f"{TABLE_KEY} must be bytes, not {type(data).__name__}")
    try:
        table = known_tables.find(data)
    except DataError as error:
        raise ValueError(str(error)) from error
    if vocabulary_size is not None and table.token_ids.max() >= vocabulary_size:
        raise ValueError(f"legal table allows token {table.token_ids.max()} outside the vocabulary of {vocabulary_size}")
    head, after = table.forced(0)
    start = start_of(parameters)
    if start not in (0, after) or start == END:
        raise ValueError(f"{START_KEY} must be 0 or {after}, where the table's first choice is, not {start!r}")
    longest = table.longest - (len(head) if start else 0)
    if parameters.max_tokens is not None and parameters.max_tokens < longest:
        raise ValueError(f"max_tokens {parameters.max_tokens} would cut a completion of {longest} tokens")


def start_of(parameters: "SamplingParams") -> int:
    """The node of its table at which an admitted request's first token is drawn."""
    return (parameters.extra_args or {}).get(START_KEY, 0)


def table_of(parameters: "SamplingParams", vocabulary_size: int) -> LegalTable | None:
    """The table of a request that is in the engine already; None if it carries none. Raises nothing.

    Admission has refused what is malformed. Should it have run where the vocabulary's size was not known, a table beyond it is
    no table either: the request then runs unconstrained, and whoever reads its answer finds it illegal.
    """
    data = (parameters.extra_args or {}).get(TABLE_KEY)
    try:
        table = None if data is None else known_tables.find(data)
    except (DataError, TypeError):
        return None
    return None if table is None or table.token_ids.max() >= vocabulary_size else table
