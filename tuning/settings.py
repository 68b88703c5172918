"""Settings of the tuner: the axes of the grid, the requests, and the constraints of the choice."""

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
    """The grid, the requests and the constraints. An axis without values keeps the current setting."""

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
    """Requests in flight; becomes inference.max_in_flight."""
    request_rate: tuple[Rate, ...] = ()
    """Requests that arrive each second, at random moments; tried in addition to `concurrency`."""
    block_size: tuple[Block, ...] = ()
    """Values of inference.block_size, tokens."""
    adapter_rank: tuple[Rank, ...] = ()
    """Values of inference.adapter_rank, the rank of the slots; the adapter stays the same."""
    prefix_caching: tuple[Literal["on", "off"], ...] = ()
    """Values of inference.prefix_caching."""
    adapters: tuple[Literal["slots", "merge_reload"], ...] = ()
    """Values of inference.adapters: how policy versions are served."""
    max_latency_ms: Annotated[float, Field(gt=0)] = 13_000.0
    """Upper bound of the P99 latency in milliseconds, to the whole completion; goodput counts requests within it."""
    min_cache_hit: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Least share of prompt tokens from the prefix cache."""
    requests: Annotated[int, Field(ge=8, le=100_000)] = 256
    """Requests of a pass, raised to twice the greatest concurrency if lower."""
    rounds: Annotated[int, Field(ge=1, le=20)] = 2
    """Passes with the adapter, and as many without; figures are medians, and their spread is the noise."""
    confirm: bool = True
    """Measure the current settings and the fastest candidate again, and require the gain again (on a CPU also in CPU time)."""
    random_prompt_tokens: Annotated[int, Field(ge=1)] = 128
    """Prompt tokens of random requests, which are used without a run."""
    random_completion_tokens: Annotated[int, Field(ge=2)] = 384
    """Completion tokens of random requests."""
    random_shared: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a random prompt that is the same for all."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of this machine for an hour, in any currency, for the cost of a thousand decisions; 0: unknown."""
    candidate_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of a candidate in seconds after its engine has started."""
    retry_failed: bool = False
    """Measure failed candidates again."""
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
