"""The HTTP payloads of a vLLM server: request bodies, checks of answers, probes. Nothing here waits.

A decision goes to `/inference/v1/generate`, which takes and returns token ids. Our logits processor samples with the request's
seed and temperature, and leaves vLLM one token to take; a seed for vLLM itself would cost a kernel launch per request over the
whole vocabulary. Forced tokens at the start of a completion are passed as the end of the prompt.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from entente.decoding.legal_table import END, LegalTable
from entente.inference.legal_admission import SAMPLING_KEY, START_KEY, TABLE_KEY, encode_table
from entente.inference.sampling import seed_array, uniforms
from entente.records.policy_version import BASE_HASH, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError

PROBE_TEMPERATURE = 2.0
"""High enough that a probability of 1 at every position shows that the log-probabilities are not ours."""
SIDE_BY_SIDE, FLOAT32, ROUNDED = 1e-6, 1e-3, 0.1
"""Largest differences of two probes with the same weights, nats: at one server in one batch, at two servers in float32, at two
servers in a shorter format, where tokens may differ too."""


def adapter_name(policy: PolicyVersion, base: str) -> str:
    """The name under which a server serves `policy`, unique for its weights; `base`: its name of the base model."""
    return base if policy.adapter_hash == BASE_HASH else f"v{policy.version}-{policy.adapter_hash[:8]}"


def forced_prefix(table: LegalTable) -> tuple[list[int], int]:
    """The forced tokens at the start of every completion, and the node after them. Empty with node 0 if the table starts with a
    thought or has no branching node."""
    head, start = table.forced(table.start)
    return (head, start) if start >= 0 else ([], 0)


def request_body(request: GenerationRequest, model: str, eos_id: int) -> bytes:
    """JSON of a request to the model or adapter named `model`; vLLM returns the log-probability of each sampled token."""
    head, start = forced_prefix(request.table)
    sampling = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": request.table.longest - len(head),
        "stop_token_ids": [eos_id],
        # A thought may contain other ids that vLLM takes for an end of sequence.
        "ignore_eos": request.table.thought is not None,
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {
            TABLE_KEY: encode_table(request.table),
            START_KEY: start,
            SAMPLING_KEY: [request.seed, request.temperature],
        },
    }
    token_ids = np.asarray([*request.prompt_ids, *head]).tolist()
    fields = {"model": model, "token_ids": token_ids, "sampling_params": sampling}
    return json.dumps(fields, separators=(",", ":")).encode()


def read_answer(
    content: bytes, request: GenerationRequest, policy: PolicyVersion, *, model: str, worker: str, took_ms: float
) -> Generation:
    """The answer to `request`, if the model or adapter named `model`, which is `policy`, sampled it and it is a valid row. Raises
    DataError if another model sampled it, its tokens are no complete path in the table, or a log-probability is impossible."""
    try:
        fields = json.loads(content)
        (choice,) = fields["choices"]
        sampled, entries = choice["token_ids"], choice["logprobs"]["content"]
        named, logprobs = [_token_of(entry) for entry in entries], [float(entry["logprob"]) for entry in entries]
        sampled_by = fields["model"]
        cached = ((fields.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"its answer cannot be read ({error!r})") from error
    if sampled_by != model:
        raise DataError(f"'{sampled_by}' answered a request for '{model}'")
    if named != sampled or not all(type(token) is int for token in sampled) or type(cached) is not int:
        raise DataError("its answer has log-probabilities of other tokens than it sampled")
    head = forced_prefix(request.table)[0]
    tokens = [*head, *sampled]
    _, offsets = request.table.legal_sets(tokens)
    values = np.array([0.0] * len(head) + logprobs, np.float32)
    forced = np.diff(offsets) == 1  # an open set has more than one number
    impossible = ~((values > -9000) & (values < 1e-3)) | (forced & (np.abs(values) > 1e-3))  # NaN is impossible too
    if impossible.any():
        position = int(np.argmax(impossible))
        raise DataError(f"the log-probability at position {position} is {values[position]}, which is impossible")
    values[forced] = 0.0
    return Generation(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.minimum(values, 0.0),
        policy=policy,
        worker=worker,
        decode_ms=took_ms,
        cached_tokens=max(0, min(cached, len(request.prompt_ids))),
    )


def _token_of(entry: dict[str, Any]) -> int:
    """The token of a log-probability; vLLM 0.26 has it only in its text."""
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))


def throwaway_request(request_id: str, eos_id: int, *, prompt: int = 8, tokens: int = 2, first: int = 0) -> GenerationRequest:
    """A request with `prompt` prompt ids, of which the first is `first`, and `tokens` completion tokens: each but the last has
    three legal ids; the last is forced."""
    others = [token for token in range(4) if token != eos_id][:3]
    nodes = tokens - 1
    table = LegalTable(
        offsets=np.append(3 * np.arange(nodes + 1), 3 * nodes + 1).astype(np.int32),
        token_ids=np.array([*(others * nodes), eos_id], np.int32),
        next_nodes=np.append(np.repeat(np.arange(1, nodes + 1), 3), END).astype(np.int32),
        longest=tokens,
    )
    return GenerationRequest(request_id=request_id, prompt_ids=[first, *[eos_id] * (prompt - 1)], table=table, seed=first)


def probe_request(eos_id: int, version: int) -> GenerationRequest:
    """A request whose answer shows whether a server has our processor and which weights it has. Each version has its own
    prompt, so that no cached prefix makes two probes differ."""
    request = throwaway_request(f"probe of version {version}", eos_id, tokens=12, first=version % 64)
    return replace(request, temperature=PROBE_TEMPERATURE)


def same_weights(one: Generation, other: Generation, tolerance: float, probe: GenerationRequest) -> bool:
    """Whether the same weights may have sampled both answers to `probe`. Rounding changes a token only if the random number is
    near the boundary of the two, and that of the first or last legal id is known from its probability."""
    different = np.flatnonzero(one.token_ids != other.token_ids)
    common = int(different[0]) if len(different) else len(one.token_ids)
    if len(different):
        if tolerance < ROUNDED:
            return False
        ids, offsets = probe.table.legal_sets(one.token_ids.tolist())
        first, *_, last = ids[offsets[common] : offsets[common + 1]].tolist()
        (number,) = uniforms(seed_array([probe.seed]), np.array([common]))
        for answer in (one, other):
            token, probability = answer.token_ids[common], np.exp(answer.logprobs[common])
            boundary = {first: probability, last: 1 - probability}.get(int(token), number)
            if abs(boundary - number) > tolerance:
                return False
    return bool((np.abs(one.logprobs[:common] - other.logprobs[:common]) <= tolerance).all())


def read_counter(page: bytes, name: str) -> float:
    lines = (line for line in page.decode().splitlines() if line.startswith((name + "{", name + " ")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def error_message(content: bytes) -> str:
    try:
        fields: Any = json.loads(content)
        return str((fields.get("error") or fields)["message"])[:500]
    except (ValueError, TypeError, KeyError, AttributeError):
        return content[:200].decode(errors="replace")
