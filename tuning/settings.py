"""Settings of the tuner: the axes of its grid, what it asks of an engine, and the constraints that the choice must hold."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sequences = Annotated[int, Field(ge=1, le=4096)]
BatchedTokens = Annotated[int, Field(ge=256)]
Share = Annotated[float, Field(gt=0, lt=1)]
Gib = Annotated[int, Field(ge=1)]
InFlight = Annotated[int, Field(ge=1, le=4096)]
Rate = Annotated[float, Field(gt=0)]
Block = Annotated[int, Field(ge=16, le=128, multiple_of=16)]
Rank = Annotated[int, Field(ge=1, le=512)]


class TuneSettings(BaseModel):
    """What is tried, on which requests, and what counts as good. An axis without values stays as the settings have it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Tuning")

    max_sequences: tuple[Sequences, ...] = (64, 128, 256)
    """Values of inference.max_sequences (vLLM's max_num_seqs); on a GPU 128, 256 and 512."""
    max_batched_tokens: tuple[BatchedTokens, ...] = (4096, 8192)
    """Values of inference.max_batched_tokens (vLLM's max_num_batched_tokens); on a GPU 4096, 8192 and 16384."""
    gpu_memory_share: tuple[Share, ...] = ()
    """Values of inference.gpu_memory_share, such as 0.85, 0.89 and 0.93; on a GPU only."""
    kv_cache_gib: tuple[Gib, ...] = ()
    """Values of inference.kv_cache_gib; on a CPU only."""
    concurrency: tuple[InFlight, ...] = (128,)
    """Requests kept in flight by whoever asks, becomes inference.max_in_flight; an engine's other settings matter only where
    that many are."""
    request_rate: tuple[Rate, ...] = ()
    """Requests that arrive each second, at random moments, whether others are done or not; each is tried beside `concurrency`."""
    block_size: tuple[Block, ...] = ()
    """Values of inference.block_size, tokens."""
    adapter_rank: tuple[Rank, ...] = ()
    """Values of inference.adapter_rank: the rank of slots, not of the adapter, which stays the same."""
    prefix_caching: tuple[Literal["on", "off"], ...] = ()
    """Values of inference.prefix_caching."""
    adapters: tuple[Literal["slots", "merge_reload"], ...] = ()
    """Values of inference.adapters: how policy versions are served."""
    max_latency_ms: Annotated[float, Field(gt=0)] = 13_000.0
    """Milliseconds from a request to its whole answer that 99 of 100 may take at most; goodput counts requests within it."""
    min_cache_hit: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of prompt tokens that must come from the prefix cache, at least."""
    requests: Annotated[int, Field(ge=8, le=100_000)] = 256
    """Requests of one pass, the same for all candidates; at least twice the greatest concurrency."""
    rounds: Annotated[int, Field(ge=1, le=20)] = 2
    """Passes with the adapter and without; medians count, and their spread says what noise is."""
    confirm: bool = True
    """Measure the settings in force and the fastest candidate once more, one right after the other, and believe a gain only if
    it is there again, on a CPU in CPU time as well: a machine that others use too is as fast as they leave it."""
    random_prompt_tokens: Annotated[int, Field(ge=1)] = 128
    """Prompt tokens of random requests, asked where no run is named."""
    random_completion_tokens: Annotated[int, Field(ge=2)] = 384
    """Completion tokens of random requests."""
    random_shared: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a random prompt that all of them begin with."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of this machine for an hour, in any currency, for the cost of a thousand decisions; 0: not told."""
    candidate_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a candidate may take once its engine has started; for the start itself: inference.start_timeout_s."""
    retry_failed: bool = False
    """Try candidates again that did not start, died or took too long."""
    seed: int = 0
    """Seed of random requests, arrivals and draws."""

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> "TuneSettings":
        if not self.concurrency and not self.request_rate:
            raise ValueError("concurrency and request_rate are both empty: give one of them a value, such as concurrency 128")
        return self

    @property
    def passes(self) -> int:
        """Passes of one candidate, over both arms."""
        return 2 * self.rounds

    @property
    def asked(self) -> int:
        """Requests of one pass."""
        return max(self.requests, 2 * max(self.concurrency, default=0))
