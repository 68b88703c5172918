"""A label: a decision position with the order sets that a search compared there.

It holds text alone, so a model with any tokenizer and prompt can learn from it. The annotations are Arrow types, from which
`storage/arrow_files.py` builds the schema; increase `LABEL_SCHEMA_VERSION` there if you change a field.
"""

from dataclasses import dataclass

from entente.records.rows import Category, Float32List, Int16, Int32List, Int64, Text, TextList, UInt32


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    game: Int64
    """Number of the game, unique within its folder."""
    phase_index: Int16
    phase: Text
    """Short phase name, e.g. S1903M."""
    power: Category
    snapshot_id: Text
    position: Text
    """The position, canonical JSON."""
    orders: TextList
    """[N] distinct order sets, the orders of each separated by "; ". The first is what the policy sampled."""
    values: Float32List
    """[N] mean value of each over its playouts, in centres."""
    visits: Int32List
    """[N] playouts of each; those with as many as the best were played in the same scenarios."""
    best: Int16
    """Index of the search's choice."""
    checksum: UInt32 = 0
    """CRC32 over all other columns of the row; to_table() fills it in."""
