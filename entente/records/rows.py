"""The types of a decision: the request to an engine, its generation, and the row; `PlayedPhase` is the row of a phase.

Requests and generations hold token ids only; `entente/inference/vllm_wire.py` defines their wire format. Annotations are Arrow
types, from which `storage/arrow_files.py` builds the schemas; increase `SCHEMA_VERSION` there if you change a field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from entente.decoding.legal_table import LegalTable
from entente.records.policy_version import PolicyVersion

Int16 = Annotated[int, pa.int16()]
Int32 = Annotated[int, pa.int32()]
Int64 = Annotated[int, pa.int64()]
UInt32 = Annotated[int, pa.uint32()]
Float32 = Annotated[float, pa.float32()]
Text = Annotated[str, pa.string()]
Category = Annotated[str, pa.dictionary(pa.int8(), pa.string())]
Int32List = Annotated[Sequence[int] | npt.NDArray[np.int32], pa.list_(pa.int32())]
Float32List = Annotated[Sequence[float] | npt.NDArray[np.float32], pa.list_(pa.float32())]
TextList = Annotated[Sequence[str], pa.list_(pa.string())]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and its legal completions."""

    request_id: str
    """Unique within a run. The same id with the same seed gives the same completion."""
    prompt_ids: Sequence[int]
    table: LegalTable
    seed: int
    """Sampling seed of this completion, 63 bits."""
    temperature: float = 1.0
    snapshot_id: str = ""
    """Snapshot of the prompt: a client of several servers sends equal snapshots to one server, for its prefix cache."""
    version: int | None = None
    """Policy version to sample from; the engine must serve it. None: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    token_ids: np.ndarray
    """int32 [completion tokens], with the end token."""
    logprobs: np.ndarray
    """float32 [completion tokens], nats, under the masked policy after temperature; 0 where forced."""
    policy: PolicyVersion
    worker: str
    queue_ms: float = 0.0
    """From the request's arrival at the engine to its first scheduling; 0 with a vLLM server, which does not report it."""
    prefill_ms: float = 0.0
    """From first scheduling to the first token; 0 with a vLLM server."""
    decode_ms: float = 0.0
    """From the first token to the last; with a vLLM server, the time of the whole request."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The order set of one power in one phase of one fork: one prompt, one completion, one row. Rows are built when the fork
    ends. The earlier decisions of a failed fork are kept with status "failed"; the trainer skips them."""

    decision_id: Int64 = 0
    snapshot_id: Text
    """The snapshot that the fork started from."""
    start_group: Int64 = 0
    """Number of the start group: unique and increasing within its producer."""
    fork: Int16 = 0
    """Number of the fork within its start group, from 0."""
    phase_index: Int16
    power: Category
    phase: Text
    """Short phase name, e.g. S1903M."""
    game_id: Text = ""
    """Source game of the snapshot."""
    seed: Int64
    opponents: Text = ""
    """Players of the other powers: random, policy:12 (a past version) or policy; by seat AUSTRIA=random,ENGLAND=policy:12,..."""
    policy_version: Int32
    worker: Text
    adapter_hash: Text
    input_ids: Int32List
    """[prompt_len + n_completion] token ids: prompt, then completion."""
    prompt_len: Int32
    behaviour_logprobs: Float32List
    """[n_completion] nats, after the legal mask and temperature."""
    legal_ids: Int32List
    """[legal_offsets[-1]] legal token ids of all positions, one position after another; for a thought token an open set."""
    legal_offsets: Int32List
    """[n_completion + 1] the legal set of position i is legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""
    temperature: Float32
    orders: TextList
    """The orders for the game engine, in the order of the sites."""
    centres_gained: Float32 = 0.0
    """Change of the number of centres, from this decision to the power's next in this fork, or to the fork's end."""
    sos_share: Float32 = 0.0
    """Change of the power's share of the sum of squared centres over the same span."""
    draw_share: Float32 = 0.0
    """Change of the power's share in a draw of all survivors over the same span."""
    survival: Float32 = 0.0
    """Change of being alive (1) or not (0) over the same span."""
    leader_gap: Float32 = 0.0
    """Change of the distance to the leader over the same span: 0 within three centres, then -1/18 per centre."""
    balance: Float32 = 0.0
    """Change of how evenly the survivors' centres are distributed (0 to 1; 0 for a leader) over the same span."""
    units_dislodged: Float32 = 0.0
    """Other powers' units that its moves dislodged in that span."""
    units_driven_out: Float32 = 0.0
    """Own units that other powers dislodged in that span, with or without a retreat."""
    orders_void: Float32 = 0.0
    """Own orders in that span without effect, such as a support of a move that was not made."""
    orders_bounced: Float32 = 0.0
    """Own moves and retreats in that span that another unit blocked."""
    orders_rejected: Int16 = 0
    """Orders that the game engine rejected; the trainer skips rows with more than 0."""
    status: Text = "complete"
    """complete | failed."""
    reason: Text = ""
    """Why it failed; empty if complete."""
    ended: Text = ""
    """Why the fork ended: horizon | won | drawn | eliminated | settled | failed."""
    queue_ms: Float32
    prefill_ms: Float32
    decode_ms: Float32
    engine_ms: Float32 = 0.0
    """Milliseconds of the game engine for this phase, without the legal orders that forks share."""
    cached_tokens: Int32
    """Prompt tokens from the prefix cache."""
    checksum: UInt32 = 0
    """CRC32 over all other columns of the row; to_table() fills it in."""

    @property
    def completion_ids(self) -> npt.NDArray[np.int32]:
        return np.asarray(self.input_ids[self.prompt_len :])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPhase:
    """One played phase of one fork, for replays, boards and on-policy snapshots. The last one of a completed fork is its final
    position, without orders, unless the game is over."""

    start_group: Int64 = 0
    fork: Int16 = 0
    phase_index: Int16
    phase: Text
    snapshot_id: Text
    """Id of the position before the orders."""
    position: Text
    """The position before the orders, canonical JSON."""
    orders: Text = "{}"
    """JSON object: power -> list of orders, including those of scripted players."""
    results: Text = "{}"
    """JSON object: unit -> list of results."""


def decision_id(producer: str, start_group: int, fork: int, phase_index: int, power: str) -> int:
    """A positive 63-bit number that is the same for the same decision in every attempt and on every machine."""
    identity = "\0".join((producer, str(start_group), str(fork), str(phase_index), power)).encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1 or 1
