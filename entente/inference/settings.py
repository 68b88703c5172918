"""Settings of inference: which model, where it runs, and how much of the machine it may take."""

from typing import Annotated, Literal

from pydantic import Field

from entente.telemetry.setting_marks import MAY_CHANGE, HttpAddress, Settings

KEY_VARIABLE = "ENTENTE_KEY"
"""Name of the environment variable that holds the servers' key; the key itself is never written to a file."""


class InferenceSettings(Settings):
    """The model that plays and the engine, or servers, that sample its decisions."""

    model: str = "tiny"
    """'tiny' (made on the spot), a local folder, or a hub id such as 'Qwen/Qwen2.5-7B-Instruct'."""
    urls: Annotated[tuple[HttpAddress, ...], MAY_CHANGE] = ()
    """Addresses of vLLM servers (`entente serve`), such as 'http://127.0.0.1:8100'; none: an engine on this machine."""
    engine: Literal["auto", "vllm", "torch"] = "auto"
    """'torch' in this process, or 'vllm': a vLLM server that this process starts; 'auto': vLLM on a GPU if it is installed,
    else torch."""
    adapter_slots: Annotated[int, Field(ge=1, le=64)] = 4
    """Adapters held at a time (vLLM's max_loras): staleness budget plus 2, plus 1 for each other version that plays."""
    adapter_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Highest adapter rank that slots accept (vLLM's max_lora_rank)."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Data type of weights and activations; float32 on a CPU."""
    max_sequences: Annotated[int, MAY_CHANGE, Field(ge=1, le=4096)] = 128
    """Maximum number of requests decoded together (vLLM's max_num_seqs)."""
    max_batched_tokens: Annotated[int, MAY_CHANGE, Field(ge=256)] = 4096
    """Maximum number of tokens in one forward pass (vLLM's max_num_batched_tokens)."""
    max_model_length: Annotated[int, Field(ge=64)] = 1024
    """Maximum length of prompt plus completion, in tokens; a longer prompt is an error."""
    kv_cache_gib: Annotated[int, MAY_CHANGE, Field(ge=1)] = 1
    """Size of the KV cache on a CPU, in GiB."""
    gpu_memory_utilization: Annotated[float, MAY_CHANGE, Field(gt=0, lt=1)] = 0.85
    """Fraction of the GPU's memory that the engine may use; lower it if the trainer uses the same GPU."""
    cards: Annotated[tuple[Annotated[int, Field(ge=0)], ...], MAY_CHANGE] = ()
    """GPUs of the engine, counted from 0 among the visible ones; none: the first `tensor_parallel`."""
    tensor_parallel: Annotated[int, MAY_CHANGE, Field(ge=1, le=64)] = 1
    """GPUs over which the engine splits each layer."""
    threads: Annotated[int, MAY_CHANGE, Field(ge=0)] = 0
    """CPU threads of the engine; 0: automatic."""
