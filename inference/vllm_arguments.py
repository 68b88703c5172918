"""Arguments of both vLLM engines, and the environment variables that vLLM reads when it is imported."""

import math
import os
from pathlib import Path
from typing import Any

from inference.engine_cards import engine_cards
from inference.server_arguments import slot_rank
from inference.settings import InferenceSettings
from inference.start_engine import start_limit_s
from telemetry.cards import take_cards

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A forked child cannot use CUDA if anything in this process has initialised it.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Turns off messages, usage reports, forked workers and vLLM's thread binding; this project sets the threads itself."""


def prepare_environment(settings: InferenceSettings, *, own_process: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported, and leave the engine's cards visible alone.

    Args:
        own_process: the engine core runs in its own process.

    Raises:
        InputError: see `engine_cards`.
    """
    take_cards(engine_cards(settings))
    # How long vLLM's own client waits for its core; our limit is the one that counts.
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(start_limit_s(settings)))
    os.environ.update(_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(own_process)))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # oneDNN caches one compiled kernel for each matrix shape, and batches have many shapes; its default of 1,024 takes 150 MB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)


def may_jump(settings: InferenceSettings) -> bool:
    """Whether this engine appends forced tokens to drawn ones (`inference.forced_jump`). vLLM must be imported already."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() if settings.jump_forced == "auto" else settings.jump_forced == "on"


def engine_arguments(model: Path, settings: InferenceSettings, *, slots: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine for the model in the folder `model`. `prepare_environment` must run first."""
    from vllm.platforms import current_platform

    from inference.legal_processor import LegalOrderProcessor

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "enforce_eager": on_cpu if settings.enforce_eager == "auto" else settings.enforce_eager == "on",
        "max_model_len": settings.max_model_length,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "block_size": settings.block_size,
        "gpu_memory_utilization": settings.gpu_memory_share,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": True,
        # A request that vLLM draws by a seed (benchmarks without the mask) cannot be prefilled in parts on a CPU: its generator
        # must be rewound, which torch's CPU generators do not support. Our own draws need no generator.
        "enable_chunked_prefill": not on_cpu,
        # The processor draws, and leaves the drawn token's log-probability as its logit.
        "logprobs_mode": "processed_logits",
        # By name, so that an engine core in another process can import it.
        "logits_processors": [f"{LegalOrderProcessor.__module__}:{LegalOrderProcessor.__qualname__}"],
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if may_jump(settings):
        from inference.forced_jump import EXTENSION

        arguments |= {"worker_extension_cls": EXTENSION, "async_scheduling": False}
    if slots:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.adapter_slots,
            "max_cpu_loras": settings.adapter_slots,
            "max_lora_rank": slot_rank(settings.adapter_rank),
        }
    return arguments


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions that vLLM raises for a refused request: ValueError, and VLLMClientError in later releases."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMClientError)
