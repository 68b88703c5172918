"""The contract of every inference engine: token ids in, token ids and processed logprobs out.

An engine serves one policy version at a time or several, but each completion is drawn whole under one version, and says which.
It never sees text, never truncates a prompt, and never returns a token outside the table that came with the request.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine started: requests as they come, tokens as completions end, so that shares of tokens are shares."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache; the share is the ratio of differences."""
    completion_tokens: int
    drawn_tokens: int
    """Those of them that took a row of a pass; the others were forced, and taken with the one before them."""
    engine_steps: int
    """Forward passes; drawn_tokens / engine_steps is the mean batch occupancy of decoding."""
    forced_tokens: int
    """Completion tokens whose probability was 1: those with a single legal id."""
    preemptions: int
    """Requests put back because the key-value cache was full."""
    running: int
    """Requests in flight now."""
    policy_version: int
    """Newest version served."""


@runtime_checkable
class TroubledEngine(Protocol):
    """An engine that has something to tell of what went wrong and was mended."""

    def events(self) -> dict[str, int]:
        """Counts since it started, by the event's name."""
        ...


@runtime_checkable
class ScrapedEngine(Protocol):
    """An engine whose workers' Prometheus pages are read on a beat."""

    def scraped(self) -> dict[str, float]:
        """Registered `workers/` figures since the last call."""
        ...


class Engine(Protocol):
    """What rollouts ask of inference. All methods run on the client's one event loop."""

    name: str

    async def start(self) -> None:
        """Load the base model and warm up; ready when it returns."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion, whole under one version: the one asked for, else the newest.

        Raises:
            VersionGoneError: the version is not served, or was retired while this request was in flight.
            EngineLostError: the engine failed.
            EngineError: the request was refused.
        """
        ...

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` from now on; requests in flight finish under the version they began with.

        Publishing a version that is served already, with the same number and hash, makes it the newest and changes nothing else.

        Raises:
            DataError: the adapter cannot be served here (unreadable, another base, a rank too high, another hash);
                nothing has changed.
            EngineLostError: the engine failed.
        """
        ...

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Serve no version before `oldest` any more, but for those in `keep` and the newest.

        Requests in flight under a retired one end with `VersionGoneError`.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counts so far."""
        ...

    async def close(self) -> None:
        """Free everything; requests in flight fail."""
        ...
