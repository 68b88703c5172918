"""Command and environment of vLLM's own server, for a run that starts one and for users who start one by hand.

The server imports our logits processor by name, and loads policy versions as LoRA adapters. The locked release is vLLM 0.32;
0.26, the last for torch 2.11, works too. Both use the V1 runner: V2 takes no processor of this interface.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from entente.inference.engine_cards import computes_on_card, engine_cards, engine_family
from entente.inference.page_gate import KEY_OF_SERVER
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.telemetry.cards import VARIABLE
from entente.telemetry.vllm_environment import VllmEnvironment, find_vllm

MODULE = "vllm.entrypoints.openai.api_server"
"""vLLM's server as a module; `vllm serve` fails in the CPU build."""
PROCESSOR = "entente.inference.legal_processor:LegalOrderProcessor"
PAGE_GATE = "entente.inference.page_gate.PageGate"
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CACHE_BLOCK = 32
"""Tokens of a key-value cache block; only whole blocks are shared. The minimum of vLLM's CPU attention."""
START_S = 300.0
"""Time limit of a start without compiling, seconds."""
COMPILING_START_S = 1800.0
"""Time limit of a start with compiling and CUDA graphs, seconds. SmolLM2 took under 140 s on an H200; large models are
unmeasured."""


def server_arguments(model: Path, settings: InferenceSettings, *, host: str, port: int) -> list[str]:
    options = {
        "--model": model,
        "--host": host,
        "--port": port,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_length,
        "--max-num-seqs": settings.max_sequences,
        "--max-num-batched-tokens": settings.max_batched_tokens,
        "--block-size": CACHE_BLOCK,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--logits-processors": PROCESSOR,
        "--middleware": PAGE_GATE,
        # The processor samples, and leaves the token's log-probability as its logit.
        "--logprobs-mode": "processed_logits",
        "--generation-config": "vllm",
        "--max-loras": settings.adapter_slots,
        "--max-cpu-loras": settings.adapter_slots,
        "--max-lora-rank": slot_rank(settings.adapter_rank),
        # The trainer's head computes in float32 as well: 16-bit logits of 16 to 32 are multiples of 0.125.
        **({} if settings.dtype == "float32" else {"--hf-overrides": '{"head_dtype":"float32"}'}),
    }
    flags = (
        "--skip-tokenizer-init",
        "--enable-prefix-caching",
        "--enable-lora",
        *scale_out_flags(),
        "--enable-prompt-tokens-details",  # reports how much of a prompt the prefix cache held
        "--disable-uvicorn-access-log",
        # On a CPU compiling costs more time than it saves.
        *([] if computes_on_card(settings) else ["--enforce-eager"]),
    )
    return [*(str(part) for pair in options.items() for part in pair), *flags]


def scale_out_flags() -> list[str]:
    """Enable the route that takes and returns token ids. Releases before 0.30 always have it, and reject the flag."""
    vllm = find_vllm()
    return [] if vllm and vllm.vllm and Version(vllm.vllm) < Version("0.30") else ["--enable-scale-out"]


def server_environment(settings: InferenceSettings) -> dict[str, str]:
    """Variables for the server, without its key; raises InputError as `engine_cards`."""
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # A forked child cannot use CUDA if anything in its parent has initialised it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if settings.dtype == "float32":
        # vLLM's Triton kernels of attention and LoRA multiply float32 as TF32 on a card otherwise: 1e-3 nats from the trainer.
        variables["TRITON_F32_DEFAULT"] = "ieee"
    if cards := engine_cards(settings):
        # Else the server inherits the flow's number of threads, and vLLM does not choose its own.
        return variables | {VARIABLE: ",".join(card.uuid for card in cards), "OMP_NUM_THREADS": "1"}
    variables |= {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        # Else vLLM binds its threads to the first cores, which a trainer or a second server may use too.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # oneDNN caches one compiled kernel for each matrix shape; its default of 1,024 takes 150 MB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }
    return variables | ({"OMP_NUM_THREADS": str(settings.threads)} if settings.threads else {})


def command_text(vllm: VllmEnvironment, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    program = [f'PATH={shlex.quote(str(vllm.python.parent))}:"$PATH"', shlex.quote(str(vllm.python)), "-P", "-m", MODULE]
    return " ".join([f'{KEY_OF_SERVER}="${KEY_VARIABLE}"', *variables, *program, shlex.join(arguments)])


def slot_rank(rank: int) -> int:
    """The smallest slot rank of at least `rank`: larger slots are padded, which costs time."""
    return next((each for each in SLOT_RANKS if each >= rank), SLOT_RANKS[-1])


def start_limit_s(settings: InferenceSettings) -> float:
    return COMPILING_START_S if compiles(settings) else START_S


def compiles(settings: InferenceSettings) -> bool:
    """Whether the engine compiles at its start; assumed for remote servers."""
    return bool(settings.urls) or (engine_family(settings) == "vllm" and computes_on_card(settings))
