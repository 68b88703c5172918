"""The rows of a run: one decision and one ply.

Each field names its Arrow type; `storage/schema.py` builds the files' schemas from them. A change of a field raises
`storage.schema.SCHEMA_VERSION`. Rollouts make these rows, `storage` writes and reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
class Decision:
    """One power's whole order set at one ply of one fork: one prompt, one completion, one row.

    The decisions of a fork that failed later are whole, but their status says so and they are not trained on.
    """

    decision_id: Int64
    """Stable identity, positive: see decision_id()."""
    snapshot_id: Text
    """The snapshot that the fork started from."""
    start_group: Int64
    """Number of the start group, unique and growing within its producer."""
    fork: Int16
    """Number of the fork within its start group, from 0."""
    ply: Int16
    """Phase index since the fork, from 0."""
    power: Category
    """The power that decides."""
    phase: Text
    """Short phase name, e.g. S1903M."""
    game_id: Text
    """Source game of the snapshot."""
    seed: Int64
    """Seed of this decision's draws."""
    opponents: Text
    """Who plays the other powers, e.g. random, mover or policy."""
    policy_version: Int32
    """Trainer steps in the adapter that drew every token of the completion; 0 is the base model."""
    worker: Text
    """Inference worker that answered."""
    adapter_hash: Text
    """Hash of that adapter's files; of the base model for version 0."""
    input_ids: Int32List
    """[prompt_len + n_completion] token ids, prompt then completion."""
    prompt_len: Int32
    """Tokens of the prompt."""
    behaviour_logprobs: Float32List
    """[n_completion] nats, after legal mask and temperature."""
    legal_ids: Int32List
    """[legal_offsets[-1]] token ids allowed, position after position."""
    legal_offsets: Int32List
    """[n_completion + 1] position i allowed legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""
    temperature: Float32
    """Sampling temperature."""
    orders: TextList
    """The orders as given to the engine, in the order of the sites."""
    centres_gained: Float32
    """Centres, from this decision to the power's next in this fork or the fork's end."""
    sos_share: Float32
    """Change of the sum-of-squares share over the same span."""
    draw_share: Float32
    """Change of the share of a draw among the survivors over the same span."""
    survival: Float32
    """Change of being alive (0 or 1) over the same span."""
    leader_gap: Float32
    """Change of the distance to the leader (0 within three centres, then -1/18 a centre) over the same span."""
    balance: Float32
    """Change of how evenly the survivors' centres lie (0 to 1; 0 for a leader) over the same span."""
    units_dislodged: Float32
    """Units of others that its moves drove out in that span."""
    units_driven_out: Float32
    """Own units that others drove out in that span, whether they could retreat or not."""
    orders_void: Float32
    """Own orders in that span that came to nothing, as a support of a move that was not made."""
    orders_bounced: Float32
    """Own moves and retreats in that span that another unit kept out."""
    orders_rejected: Int16
    """Orders that the engine did not accept; must be 0 to be trained on."""
    status: Text
    """complete | failed."""
    reason: Text
    """Why it failed, empty when complete."""
    ended: Text
    """Why the fork ended: horizon | won | drawn | eliminated | settled | failed."""
    queue_ms: Float32
    """Milliseconds between the request and its first scheduling."""
    prefill_ms: Float32
    """Milliseconds from the first scheduling to the first token."""
    decode_ms: Float32
    """Milliseconds from the first token to the last."""
    engine_ms: Float32
    """Milliseconds that the game engine took for this ply."""
    cached_tokens: Int32
    """Prompt tokens that came from the prefix cache."""
    checksum: UInt32 = 0
    """CRC32 over all other columns of the row; to_table fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ply:
    """One phase of one fork as it was played: what replay, boards and on-policy snapshots read.

    The last of a fork that ran to its end is the position it ended at, without orders; a game that is over has none.
    """

    start_group: Int64
    """As in Decision."""
    fork: Int16
    """As in Decision."""
    ply: Int16
    """As in Decision."""
    phase: Text
    """Short phase name of the position."""
    snapshot_id: Text
    """Id of the position before the orders."""
    position: Text
    """That position, canonical JSON."""
    orders: Text
    """JSON object: power -> list of orders, scripted players too."""
    results: Text
    """JSON object: unit -> list of results."""


def decision_id(producer: str, start_group: int, fork: int, ply: int, power: str) -> int:
    """The same decision gets the same positive 63-bit number in every attempt and on every machine."""
    identity = "\0".join((producer, str(start_group), str(fork), str(ply), power)).encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1 or 1
