"""The format of requests and answers between client and worker: msgpack maps, with arrays as little-endian bytes.

Every message is checked here, types and sizes first, so that no malformed message reaches an engine or a row.
"""

from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from decoding.legal_table import END, LegalTable
from records.generation import Generation, GenerationCost, GenerationRequest
from records.policy_version import PolicyVersion
from telemetry.errors import DataError
from workers.flow_control import WorkerLoad

CONTENT_TYPE = "application/msgpack"
MAX_BODY = 8 << 20
"""Largest generation request, bytes."""
MAX_JSON = 1 << 17
"""Largest JSON request (publish or retire), bytes."""
MAX_PROMPT = 1 << 18
"""Longest prompt, tokens; the engine's own limit is far lower."""
MAX_TABLE_BYTES = 4 << 20
"""Largest table, bytes: half a million edges. Ten units with 400 orders each have about ten thousand."""
MAX_ID = 200
"""Longest request id, characters."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 4.0
"""Allowed temperatures. Below 0.01 vLLM silently uses 0.01, and dividing by a very small number overflows."""
_MAX_FIELDS = 32
"""Most fields of a message."""


def pack_request(request: GenerationRequest, asked: PolicyVersion | None = None) -> bytes:
    """Pack a request. `asked` is the version that must draw it; None: the request's own version."""
    return _pack(
        {
            "request_id": request.request_id,
            "prompt_ids": np.asarray(request.prompt_ids, "<i4").tobytes(),
            "table": request.table.to_bytes(),
            "seed": request.seed,
            "temperature": request.temperature,
            "snapshot_id": request.snapshot_id,
            "version": asked.version if asked else request.version,
            "adapter_hash": asked.adapter_hash if asked else None,
        }
    )


def unpack_request(body: bytes, vocabulary_size: int) -> tuple[GenerationRequest, PolicyVersion | None]:
    """The request in `body`, and the version that must draw it (None unless its number and hash are both given).

    Raises:
        DataError: `body` is not a valid request; the message names the field.
    """
    fields = _unpack(body)
    prompt, table = _of(fields, "prompt_ids", bytes), _of(fields, "table", bytes)
    if len(prompt) > 4 * MAX_PROMPT or len(table) > MAX_TABLE_BYTES:
        raise DataError(
            f"request has a prompt of {len(prompt)} bytes and a table of {len(table)}: "
            f"at most {4 * MAX_PROMPT} and {MAX_TABLE_BYTES} are allowed"
        )
    request_id, snapshot_id = _of(fields, "request_id", str), _of(fields, "snapshot_id", str)
    if not 0 < len(request_id) <= MAX_ID or len(snapshot_id) > MAX_ID:
        raise DataError(f"request has an id of {len(request_id)} characters: 1 to {MAX_ID} are allowed")
    version = fields.get("version")
    if version is not None and (type(version) is not int or not 0 <= version < 2**31):
        raise DataError(f"request '{request_id}' has no usable field 'version'")
    try:
        prompt_ids = np.frombuffer(prompt, "<i4")
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids.tolist(),
            table=LegalTable.from_bytes(table, vocabulary_size),
            seed=_of(fields, "seed", int),
            temperature=float(_of(fields, "temperature", float, int)),
            snapshot_id=snapshot_id,
            version=version,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"request lacks a usable field: {error}") from error
    if not len(prompt_ids) or prompt_ids.min() < 0 or prompt_ids.max() >= vocabulary_size:
        raise DataError(f"request '{request_id}' has an empty prompt or ids outside the vocabulary of {vocabulary_size}")
    if not 0 <= request.seed < 2**63:
        raise DataError(f"request '{request_id}' has seed {request.seed}: 0 to 2**63 - 1 are allowed")
    if not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:  # also refuses NaN
        raise DataError(
            f"request '{request_id}' has temperature {request.temperature}: {MIN_TEMPERATURE} to {MAX_TEMPERATURE} are allowed"
        )
    if fields.get("adapter_hash") is None:
        return request, None
    adapter_hash = _of(fields, "adapter_hash", str)
    return request, None if version is None else PolicyVersion(version=version, adapter_hash=adapter_hash)


def pack_generation(generation: Generation, *, running: int, preemptions: int) -> bytes:
    """Pack an answer with its worker's load: requests in flight now and preemptions so far."""
    return _pack(
        {
            "token_ids": generation.token_ids.astype("<i4").tobytes(),
            "logprobs": generation.logprobs.astype("<f4").tobytes(),
            **version_fields(generation.policy),
            "worker": generation.worker,
            **asdict(generation.cost),
            "running": running,
            "preemptions": preemptions,
        }
    )


def unpack_generation(body: bytes) -> tuple[Generation, WorkerLoad]:
    """The answer in `body`, and the worker's load.

    Raises:
        DataError: `body` is not a valid answer.
    """
    fields = _unpack(body)
    try:
        token_ids = np.frombuffer(_of(fields, "token_ids", bytes), "<i4")
        logprobs = np.frombuffer(_of(fields, "logprobs", bytes), "<f4")
    except ValueError as error:
        raise DataError(f"answer lacks a usable field: {error}") from error
    if len(token_ids) != len(logprobs):
        raise DataError(f"answer has {len(token_ids)} tokens but {len(logprobs)} logprobs")
    times = {name: float(_of(fields, name, float, int)) for name in ("queue_ms", "prefill_ms", "decode_ms")}
    cost = GenerationCost(cached_tokens=_of(fields, "cached_tokens", int), **times)
    generation = Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        policy=PolicyVersion(version=_of(fields, "policy_version", int), adapter_hash=_of(fields, "adapter_hash", str)),
        worker=_of(fields, "worker", str),
        cost=cost,
    )
    load = WorkerLoad(
        queue_ms=cost.queue_ms,
        service_ms=cost.prefill_ms + cost.decode_ms,
        running=_of(fields, "running", int),
        preemptions=_of(fields, "preemptions", int),
    )
    return generation, load


def version_fields(policy: PolicyVersion) -> dict[str, int | str]:
    """Number and hash of `policy`, with the field names of a worker's answer."""
    return {"policy_version": policy.version, "adapter_hash": policy.adapter_hash}


def check_answer(generation: Generation, table: LegalTable, asked: PolicyVersion) -> None:
    """Refuse an answer that must not become a row.

    Raises:
        DataError: another version or adapter than `asked` drew it, its tokens are not a complete path through the table, or a
            log-probability is impossible.
    """
    if generation.policy != asked:
        raise DataError(f"{generation.policy} drew a request for {asked}")
    state = table.start
    for position, (token, logprob) in enumerate(zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)):
        if state == END:
            raise DataError(f"the answer continues after its end, at position {position}")
        forced = len(table.allowed(state)) == 1  # an open set has two numbers
        state = table.advance(state, token)
        # The first condition also refuses NaN.
        if not -1e4 < logprob < 1e-3 or (forced and logprob < -1e-3):
            raise DataError(f"the log-probability at position {position} is {logprob}, which is impossible")
    if state != END:
        raise DataError(f"the answer of {len(generation.token_ids)} tokens stops before its end")


def _of(fields: dict[str, Any], name: str, *kinds: type) -> Any:
    """The field `name`, whose type must be exactly one of `kinds`; a bool is not an int."""
    value = fields.get(name)
    if type(value) not in kinds:
        raise DataError(f"no usable field '{name}' ({type(value).__name__})")
    return value


def _pack(fields: dict[str, Any]) -> bytes:
    packed = msgpack.packb(fields)
    assert packed is not None, "msgpack packs into memory"
    return packed


def _unpack(body: bytes) -> dict[str, Any]:
    maps = 0

    def count_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        # Millions of nested maps would take a hundred times the body's bytes.
        nonlocal maps
        maps += 1
        if maps > 1:
            raise ValueError("the map contains another map")
        return dict(pairs)

    try:
        fields = msgpack.unpackb(body, object_pairs_hook=count_map, max_map_len=_MAX_FIELDS, max_array_len=0, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DataError(f"body of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise DataError("body is not a msgpack map")
    return fields
