"""Estimates the memory that a model and its key-value cache need, and refuses a run that cannot fit before it starts.

The estimate is a lower bound: weights, cache, and the libraries' own memory, without the engine's activations. It uses a model's
config and the headers of its weight files, not the weights. This module imports neither torch nor vLLM.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from entente.decoding.architectures import FAMILIES, Architecture, read_architecture
from entente.decoding.model_files import read_config
from entente.decoding.weight_files import stored_format, stored_tensors
from entente.inference.engine_cards import engine_cards, engine_dtype, engine_family
from entente.inference.server_arguments import CACHE_BLOCK
from entente.inference.settings import InferenceSettings
from entente.telemetry.cards import CardPlan
from entente.telemetry.errors import InputError
from entente.telemetry.machine import free_memory

GIB = 2**30
_MIB = 2**20
ENGINE_PROCESS_BYTES = {"vllm": 1500 * _MIB, "torch": 610 * _MIB}
"""Engine memory without weights and KV cache: vLLM's three CPU server processes (shared pages once), or the flow with torch."""
TRAINER_PROCESS_BYTES = 320 * _MIB
"""Private memory of the trainer's process, without weights and activations.

Both were read from /proc on a machine with two cores: server 489 + 476 + 1,555 MiB (1,024 of them key-value cache); flow with
torch 711 MiB and trainer 574 MiB at its peak in a run of the laptop preset, without pages of files, as in the metrics
`memory/flow_mib` and `memory/trainer_mib`.
"""
CONTEXT_BYTES = GIB
"""GPU memory of a process beyond its tensors: CUDA's context, loaded kernels and work areas of libraries. Unmeasured; half a GiB
is usual, and libraries add to it."""

_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Architecture):
    parameters: int
    stored: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory of a machine, bytes."""

    memory: int
    """Main memory that this process may still allocate."""
    gpu_free: int = 0
    gpu_total: int = 0
    """Memory of the engine's smallest GPU; 0 if the engine computes on the CPU."""
    trainer_free: int | None = None
    trainer_total: int | None = None
    """Memory of the trainer's own GPU; None: engine and trainer share one."""

    @property
    def trainer_gpu(self) -> tuple[int, int]:
        """Free and total memory of the trainer's GPU; zeros on the CPU."""
        if self.trainer_total is None or self.trainer_free is None:
            return self.gpu_free, self.gpu_total
        return self.trainer_free, self.trainer_total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Estimated memory of a run. All fields but `tokens` and `sequence` are bytes; with several GPUs, of each GPU."""

    weights: int
    kv_cache: int
    """The key-value cache; negative on a GPU that cannot hold the weights."""
    token: int
    """One token in the key-value cache."""
    tokens: int
    """Tokens that the cache holds, in whole blocks."""
    sequence: int
    """Tokens of the longest sequence, in whole blocks."""
    process: int
    """Measured main memory of the engine's process, without weights and cache."""
    needed: int
    """Main memory of all processes, at least."""
    gpu_needed: int = 0
    """GPU memory that vLLM reserves, or to which the torch engine may grow."""

    @property
    def whole_sequences(self) -> int:
        """Number of longest sequences that fit into the cache at once without a shared prefix."""
        return max(0, self.tokens) // self.sequence


def read_shape(model: Path) -> ModelShape:
    architecture, parameters = read_architecture(model), sum(tensor.size for tensor in stored_tensors(model).values())
    return ModelShape(**asdict(architecture), parameters=parameters, stored=stored_format(model, read_config(model)))


def plan_memory(shape: ModelShape, settings: InferenceSettings, machine: Machine, *, trainer: int = 0) -> MemoryPlan:
    """Memory of an engine in this process, and of a trainer that needs `trainer` bytes of main memory. The torch engine has no
    fixed cache: its rows grow to at most `max_sequences` sequences of the greatest length."""
    kind = engine_family(settings)
    width = _WIDTHS[engine_dtype(settings, shape.stored)]
    parts = settings.tensor_parallel
    weights = shape.parameters * width // parts
    # Each card holds its part of the heads; with fewer heads than cards each holds one.
    token = 2 * shape.layers * -(-shape.key_value_heads // parts) * shape.head_width * width
    on_gpu = machine.gpu_total > 0
    block = CACHE_BLOCK
    if kind == "torch":
        kv_cache = token * settings.max_model_length * settings.max_sequences
        reserved = weights + kv_cache if on_gpu else 0
        block = 1
    else:
        reserved = int(machine.gpu_total * settings.gpu_memory_utilization)
        kv_cache = reserved - weights if on_gpu else settings.kv_cache_gib * GIB
    return MemoryPlan(
        weights=weights,
        kv_cache=kv_cache,
        token=token,
        tokens=max(0, kv_cache) // (block * token) * block,
        sequence=-(-settings.max_model_length // block) * block,
        process=ENGINE_PROCESS_BYTES[kind],
        needed=(ENGINE_PROCESS_BYTES[kind] * parts) + (0 if on_gpu else weights + kv_cache) + trainer,
        gpu_needed=reserved,
    )


def trainer_memory(
    shape: ModelShape, *, rank: int, dtype: str, targets: Collection[str] = (), tokens: int = 0, recompute: bool = False
) -> int:
    """Main memory of the trainer's process, bytes: frozen base, adapter, its gradient and two moments, and activations.

    Args:
        targets: the adapter's linear layers; none: all that the family offers.
        tokens: tokens of a micro-batch in main memory; 0: on a GPU. Saved activations count twice, for their gradients; with
            that the estimate for the laptop preset equals the measured memory.
    """
    fixed = TRAINER_PROCESS_BYTES + shape.parameters * _WIDTHS[dtype] + 4 * 4 * shape.lora_parameters(rank, targets)
    return fixed + 2 * tokens * _activation_bytes(shape, _WIDTHS[dtype], recompute)


def _activation_bytes(shape: ModelShape, width: int, recompute: bool) -> int:
    """Activations of one token that are kept for the backward, bytes: those of the blocks and the input of the last norm. With
    recomputation they are the input of each block, and all of the one block that is recomputed. Without it the last block
    keeps less, because its feed-forward part computes fewer tokens. A test counts them on models without memory."""
    block = _block_bytes(shape, width)
    return 4 * shape.hidden + (shape.layers * width * shape.hidden + block if recompute else shape.layers * block)


def _block_bytes(shape: ModelShape, width: int) -> int:
    """Activations of one token that a dense block keeps, bytes: 206 KiB for a 7B model in bfloat16.

    These are the inputs of norms, in float32; the inputs of attention and feed-forward part; query, key, value and the result
    of the attention; and four vectors inside the feed-forward part. Not counted are the expert outputs of a mixture of experts.
    """
    queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
    family = FAMILIES[shape.family]
    normed = family.norms * shape.hidden + (queries + keys if family.head_norms else 0)
    return 4 * normed + width * (2 * shape.hidden + 2 * queries + 2 * keys + 4 * shape.inner)


def trainer_gpu_memory(
    shape: ModelShape, *, rank: int, dtype: str, tokens: int, recompute: bool, targets: Collection[str] = (), parts: int = 1
) -> int:
    """Lower bound of the trainer's GPU memory, bytes: frozen base, adapter with gradient and two moments, and the activations
    of a micro-batch of `tokens`. The gradients of a block take about a third of what it keeps; half is counted. That makes 5.7
    MiB per token for a 7B model in bfloat16, and 0.5 with recomputation. `parts`: into which FSDP2 splits the blocks' weights."""
    width = _WIDTHS[dtype]
    fixed = _weights_of_part(shape, parts) * width + 4 * 4 * shape.lora_parameters(rank, targets)
    return fixed + tokens * (_activation_bytes(shape, width, recompute) + _block_bytes(shape, width) // 2)


def _weights_of_part(shape: ModelShape, parts: int) -> int:
    """Embedding and head stay whole, and a block is gathered while it is used. The sizes of experts are not in the shape."""
    in_blocks = shape.parameters if shape.has_experts else shape.linear_parameters
    return shape.parameters - in_blocks + in_blocks // parts + (in_blocks // shape.layers if parts > 1 else 0)


def check_memory(
    shape: ModelShape | None,
    settings: InferenceSettings,
    *,
    trainer: int = 0,
    trainer_gpu: int = 0,
    machine: Machine | None = None,
) -> None:
    """Refuse a run that cannot fit this machine (or `machine`); `trainer`, `trainer_gpu`: its memory, bytes. Remote servers are
    not checked. The InputError names the memory needed, the memory available, and the setting to change."""
    if shape is None:
        return
    machine = machine or this_machine(CardPlan(engine=engine_cards(settings)))
    shared = machine.trainer_total is None
    if settings.urls or not shared:
        _check_trainer_card(machine, trainer_gpu)
    if settings.urls:
        _refuse_more_than(machine, trainer, "the trainer", "choose a smaller model or training.lora_rank")
        return
    if shape.heads % settings.tensor_parallel:
        raise InputError(
            f"inference.tensor_parallel {settings.tensor_parallel} must divide the {shape.heads} attention heads of the model: "
            "change it"
        )
    in_vllm = engine_family(settings) == "vllm"
    if in_vllm and shape.has_experts and not machine.gpu_total:
        raise InputError(
            f"vLLM has no LoRA for a mixture of experts ('{shape.family}') on a CPU: set inference.engine to 'torch'"
        )
    plan = plan_memory(shape, settings, machine, trainer=trainer)
    if machine.gpu_total:
        check = _check_gpu if in_vllm else _check_gpu_of_torch
        check(plan, settings, machine, trainer_gpu if shared else 0)
    if plan.tokens < plan.sequence:
        per_gib = GIB // plan.token
        raise InputError(
            f"the key-value cache holds {plan.tokens:,} tokens, but one sequence may have {settings.max_model_length:,} "
            f"(inference.max_model_length): lower it"
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
            f"inference.gpu_memory_utilization {settings.gpu_memory_utilization} asks for {size_text(plan.gpu_needed)} of the "
            f"GPU, but {size_text(machine.gpu_free)} are free: stop what uses it, or lower the share"
        )
    if plan.kv_cache <= 0:
        raise InputError(
            f"the model's weights take {size_text(plan.weights)}, but inference.gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} gives the engine {size_text(plan.gpu_needed)}: raise it, or take a smaller model"
        )
    if trainer and plan.gpu_needed + trainer + 2 * CONTEXT_BYTES > machine.gpu_free:
        room = max(0, machine.gpu_free - trainer - 2 * CONTEXT_BYTES)
        fits = int(100 * room / machine.gpu_total) / 100
        lower = f"lower the share to {fits:g}" if room > plan.weights else "use servers on other GPUs (inference.urls)"
        raise InputError(
            f"engine and trainer share the GPU: inference.gpu_memory_utilization {settings.gpu_memory_utilization} takes "
            f"{size_text(plan.gpu_needed)} and the trainer at least {size_text(trainer)}, but {size_text(machine.gpu_free)} are "
            f"free: {lower}, or lower training.token_budget"
        )


def _check_gpu_of_torch(plan: MemoryPlan, settings: InferenceSettings, machine: Machine, trainer: int) -> None:
    """Check only that one sequence fits: rows grow with need, and rarely to what `gpu_needed` says."""
    sequence, contexts = plan.token * plan.sequence, (2 if trainer else 1) * CONTEXT_BYTES
    if (needed := plan.weights + sequence + trainer + contexts) > machine.gpu_free:
        beside = f" and the trainer at least {size_text(trainer)}" if trainer else ""
        raise InputError(
            f"the torch engine takes {size_text(plan.weights)} of the GPU for weights and {size_text(sequence)} for one sequence "
            f"of inference.max_model_length {settings.max_model_length}{beside}; with CUDA's own memory {size_text(needed)}, but "
            f"{size_text(machine.gpu_free)} are free: stop what uses it, or take a smaller model"
            + (", or lower training.token_budget" if trainer else "")
        )


def _check_trainer_card(machine: Machine, needed: int) -> None:
    free, total = machine.trainer_gpu
    if total and needed > free:
        raise InputError(
            f"the trainer needs at least {size_text(needed)} of the GPU, but {size_text(free)} are free: stop what uses it, "
            "lower training.token_budget, or set training.gradient_checkpointing"
        )


def _refuse_more_than(machine: Machine, needed: int, what: str, cure: str) -> None:
    if needed > machine.memory:
        raise InputError(
            f"{what} needs at least {size_text(needed)} of memory, but {size_text(machine.memory)} are available here: {cure}"
        )


def this_machine(cards: CardPlan) -> Machine:
    memory = free_memory()
    free, total = (min((getattr(card, name) for card in cards.engine), default=0) for name in ("free", "total"))
    if cards.shared:
        return Machine(memory=memory, gpu_free=free, gpu_total=total)
    own = [min((getattr(card, name) for card in cards.trainer), default=0) for name in ("free", "total")]
    return Machine(memory=memory, gpu_free=free, gpu_total=total, trainer_free=own[0], trainer_total=own[1])


def trainer_share(cards: CardPlan, settings: InferenceSettings) -> float:
    """Largest share of its GPU that the trainer's tensors may allocate; 0: no limit, because it has a GPU of its own.

    vLLM does not start unless `gpu_memory_utilization` is free (`request_memory` in `v1/worker/utils.py`), and a trainer keeps
    freed memory when an engine restarts, so it gets at most the rest, less a context for each process.
    """
    if not cards.shared or engine_family(settings) == "torch":
        return 0.0
    smallest = min(card.total for card in cards.trainer)
    return max(0.01, 1 - settings.gpu_memory_utilization - 2 * CONTEXT_BYTES / smallest)


def size_text(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count // size:,} {unit}" if abs(count) >= 100 * size else f"{count / size:.1f} {unit}"
    return f"{count} bytes"
