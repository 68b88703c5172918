"""How requests and answers travel between client and worker: msgpack maps, arrays as little-endian bytes.

Everything that comes in is checked here, so that nothing malformed reaches an engine.
"""

from typing import Any

import msgpack
import numpy as np

from decoding.legal_table import LegalTable
from inference.engine import Generation, GenerationRequest
from telemetry.errors import DataError

CONTENT_TYPE = "application/msgpack"
MAX_BODY = 8 << 20
"""Bytes of the largest request a worker reads."""


def pack_request(request: GenerationRequest) -> bytes:
    """One request as it travels."""
    return _pack(
        {
            "request_id": request.request_id,
            "prompt_ids": np.asarray(request.prompt_ids, "<i4").tobytes(),
            "table": request.table.to_bytes(),
            "seed": request.seed,
            "temperature": request.temperature,
            "snapshot_id": request.snapshot_id,
            "version": request.version,
        }
    )


def unpack_request(body: bytes, vocabulary_size: int) -> GenerationRequest:
    """The request in `body`.

    Raises:
        DataError: it is not one; the sentence names the field.
    """
    fields = _unpack(body)
    try:
        prompt_ids = np.frombuffer(fields["prompt_ids"], "<i4")
        request = GenerationRequest(
            request_id=str(fields["request_id"])[:200],
            prompt_ids=prompt_ids.tolist(),
            table=LegalTable.from_bytes(fields["table"], vocabulary_size),
            seed=int(fields["seed"]),
            temperature=float(fields["temperature"]),
            snapshot_id=str(fields["snapshot_id"])[:64],
            version=None if fields["version"] is None else int(fields["version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"request lacks a usable field: {error}") from error
    if not len(prompt_ids) or prompt_ids.min() < 0 or prompt_ids.max() >= vocabulary_size:
        raise DataError(f"request '{request.request_id}' has an empty prompt or ids outside the vocabulary of {vocabulary_size}")
    if not 0 <= request.seed < 2**63 or not 0 < request.temperature <= 4:
        raise DataError(
            f"request '{request.request_id}' has seed {request.seed} or temperature {request.temperature} out of range"
        )
    return request


def pack_generation(generation: Generation) -> bytes:
    """One answer as it travels."""
    return _pack(
        {
            "token_ids": generation.token_ids.astype("<i4").tobytes(),
            "logprobs": generation.logprobs.astype("<f4").tobytes(),
            "policy_version": generation.policy_version,
            "adapter_hash": generation.adapter_hash,
            "worker": generation.worker,
            "cached_tokens": generation.cached_tokens,
            "queue_ms": generation.queue_ms,
            "prefill_ms": generation.prefill_ms,
            "decode_ms": generation.decode_ms,
        }
    )


def unpack_generation(body: bytes) -> Generation:
    """The answer in `body`.

    Raises:
        DataError: it is not one.
    """
    fields = _unpack(body)
    try:
        token_ids, logprobs = (
            np.frombuffer(fields.pop("token_ids"), "<i4"),
            np.frombuffer(fields.pop("logprobs"), "<f4"),
        )
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens but {len(logprobs)} logprobs")
        return Generation(token_ids=token_ids, logprobs=logprobs, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"worker's answer lacks a usable field: {error}") from error


def _pack(fields: dict[str, Any]) -> bytes:
    packed = msgpack.packb(fields)
    assert packed is not None, "msgpack packs into memory"
    return packed


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise DataError(f"body of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise DataError("body is not a msgpack map")
    return fields
