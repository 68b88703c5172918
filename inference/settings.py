"""Settings of inference: which model, where it runs, and how much of the machine it may take."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class InferenceSettings(BaseModel):
    """The model that plays and the engine, or workers, that draw its decisions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = "tiny"
    """'tiny' (made on the spot), a local folder, or a hub id such as 'Qwen/Qwen2.5-7B-Instruct'."""
    urls: tuple[str, ...] = ()
    """Addresses of running workers (`entente serve`), such as 'http://127.0.0.1:8100'; none: an engine in this process."""
    key_variable: str = "ENTENTE_KEY"
    """Name of the environment variable that holds the workers' key; the key itself is never written to a file."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Number format of weights and activations; float32 on the CPU, where merged updates must not be rounded away."""
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 128
    """Requests decoded together, at most (vLLM's max_num_seqs)."""
    max_batched_tokens: Annotated[int, Field(ge=256)] = 4096
    """Tokens of one forward pass, at most (vLLM's max_num_batched_tokens); on the CPU prompts are not cut, so at least
    max_model_length."""
    max_model_length: Annotated[int, Field(ge=64)] = 1024
    """Longest prompt plus completion, tokens; a longer prompt is an error, never cut."""
    block_size: Annotated[int, Field(ge=16, le=128, multiple_of=16)] = 32
    """Tokens of one prefix-cache block; only whole blocks are shared, and vLLM on the CPU needs a multiple of 32."""
    kv_cache_gib: Annotated[int, Field(ge=1)] = 1
    """Memory of the key-value cache on the CPU, GiB."""
    gpu_memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of the GPU's memory that the engine may take; lower it where the trainer sits on the same card."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the engine; 0: planned from the cores and from what computes at the same time."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds until an engine or a worker must be ready."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds until a worker must have answered one request."""
