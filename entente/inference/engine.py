"""The contract of every inference engine: token ids in, token ids and log-probabilities out.

An engine serves one or several policy versions. Each completion is sampled from one version, which the generation names. An
engine sees no text, truncates no prompt, and returns only tokens that the request's legal table allows.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from entente.records.policy_version import BASE_VERSION, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine started. Requests count on arrival; tokens count when a completion ends."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    """Completion tokens that used a row of a forward pass; the others were forced and added without one. A vLLM
    server forwards forced tokens too, except those at the start."""
    engine_steps: int = 0
    """Forward passes; sampled_tokens / engine_steps is the mean batch occupancy of decoding."""
    forced_tokens: int = 0
    """Completion tokens with a single legal id."""
    preemptions: int = 0
    running: int = 0
    policy_version: int = BASE_VERSION


class Engine(Protocol):
    """The interface between rollouts and inference. All methods run on one event loop."""

    name: str

    async def start(self) -> None:
        """Load the base model and warm up; the engine is ready when this returns."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample from the requested version, or else the newest. Raises VersionGoneError if it is not served or was retired in
        flight, EngineLostError if the engine failed, EngineError if the request was refused."""
        ...

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` as the newest version. Requests in flight finish under the version with which they started.

        A version that is already served (same number and hash) only becomes the newest. `BASE` serves the base model again, also
        after it was retired. Raises DataError, with nothing changed, if the adapter cannot be served; EngineLostError.
        """
        ...

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Stop serving versions before `oldest`, but the newest and `keep`; requests in flight fail with `VersionGoneError`."""
        ...

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, if there is one and no request is in flight."""

    async def use_threads(self, count: int) -> None:
        """Compute with `count` CPU threads from now on, if the engine computes in this process."""

    async def stats(self) -> EngineStats: ...

    def events(self) -> dict[str, int]:
        """Counts of failures from which the engine recovered, by event name."""
        return {}

    async def close(self) -> None:
        """Free everything; requests in flight fail."""
        ...


def check_request(request: GenerationRequest, longest: int, vocabulary: int) -> None:
    """Raise EngineError if the request is longer than `longest` tokens, its prompt is empty, or an id or its temperature is out
    of range."""
    where, length = f"request '{request.request_id}'", len(request.prompt_ids) + request.table.longest
    if length > longest:
        raise EngineError(f"{where} needs {length} tokens but max_model_length is {longest}: raise inference.max_model_length")
    ids = np.concatenate((np.asarray(request.prompt_ids, np.int64), request.table.token_ids))
    if not len(request.prompt_ids) or ids.min() < 0 or max(ids.max(), request.table.largest_id) >= vocabulary:
        raise EngineError(
            f"{where} has an empty prompt or ids outside the vocabulary of {vocabulary}: it was made for another model"
        )
    if not request.temperature > 0:
        raise EngineError(f"{where} has temperature {request.temperature}: it must be above 0")
