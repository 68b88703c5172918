"""A distillation target: a decision position that the student reached, with a teacher's answers. The annotations are Arrow
types, from which `storage/arrow_files.py` builds the schema; increase `SCHEMA_VERSION` there if you change a field."""

from dataclasses import dataclass
from hashlib import blake2b

from entente.records.rows import Category, Float32, Float32List, Int32, Int32List, Int64, Text, TextList, UInt32


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilTarget:
    """One position of one power, and N proposals of the teacher: order sets with their probabilities. The completions of all
    proposals are concatenated: C tokens, L legal ids."""

    distil_target_id: Int64
    decision_id: Int64
    """The student's decision at this position: a row of `source`."""
    source: Text
    """Shard that holds the student's game, below `shards/`."""
    snapshot_id: Text
    phase: Text
    """Short phase name, e.g. S1903M."""
    power: Category
    policy_version: Int32
    adapter_hash: Text
    """Its adapter's hash; 'base' for version 0."""
    temperature: Float32
    """Temperature of the student's policy; the trained policy is the one at this temperature."""
    teacher: Text
    """Hash of the teacher's settings, which the file's metadata hold."""
    prompt_ids: Int32List
    """[P] token ids of the prompt."""
    completion_ids: Int32List
    """[C] token ids of the proposals' completions, with their end tokens."""
    completion_offsets: Int32List
    """[N + 1] proposal j is completion_ids[completion_offsets[j]:completion_offsets[j + 1]]."""
    legal_ids: Int32List
    """[L] legal token ids of all completion positions, one position after another."""
    legal_offsets: Int32List
    """[C + 1] the legal set of position i is legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""
    orders: TextList
    """[N] the orders of each proposal, separated by "; "."""
    probabilities: Float32List
    """[N] the teacher's probability of each proposal; they add up to 1."""
    values: Float32List
    """[N] the teacher's mean value of each proposal, in the units of its settings."""
    visits: Int32List
    """[N] playouts behind each value."""
    checksum: UInt32 = 0
    """CRC32 over all other columns of the row; to_table() fills it in."""


def distil_target_id(shard: str, decision_id: int) -> int:
    """A positive 63-bit number, the same in every attempt; `shard` is the path below `distil_targets/`."""
    return int.from_bytes(blake2b(f"{shard}\0{decision_id}".encode(), digest_size=8).digest(), "big") >> 1 or 1
