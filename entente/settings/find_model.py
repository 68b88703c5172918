"""Finds a run's model and GPUs on this machine, and checks that the model fits, before anything heavy starts. Imports neither
torch nor Prefect. Resolves a hub id to an earlier download only; a plan asks the hub whether it has the model."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from entente.decoding.model_files import ask_hub, downloaded, may_be_hub_id, resolve_model
from entente.decoding.weight_files import has_weights
from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings
from entente.inference.engine_cards import computes_on_card, has_cuda, usable_cards
from entente.inference.memory_plan import (
    CONTEXT_BYTES,
    Machine,
    ModelShape,
    check_memory,
    read_shape,
    this_machine,
    trainer_gpu_memory,
    trainer_memory,
    trainer_share,
)
from entente.inference.settings import InferenceSettings
from entente.settings.run_settings import RunSettings
from entente.telemetry.cards import CardPlan, plan_cards, torch_cuda
from entente.telemetry.errors import InputError
from entente.training.settings import (
    CPU_TOKENS,
    GPU_TOKENS,
    TINY_VOCABULARY,
    TinyModelSettings,
    TrainingSettings,
    find_tiny,
    longest_sequence,
)
from storage.run_base import check_base
from storage.runs import MODEL_FOLDER, RunPaths

TINY = "tiny"
"""Name of the small model that a run makes itself."""


def check_room(settings: RunSettings, *, trains: bool) -> CardPlan:
    """Check that the model fits the memory of this machine and its cards, unless it is not downloaded yet. Returns the cards.

    Args:
        trains: include the trainer.

    Raises:
        InputError: it does not fit (names the memory needed and the setting to lower); its family is unknown or lacks
            `training.lora_targets`; vLLM has no LoRA for it; or see `run_cards`.
    """
    cards = run_cards(settings, trains=trains)
    machine = this_machine(cards)
    shape = shape_of(settings)
    check_length(settings.inference, None if shape is None else shape.positions, settings.inference.model)
    needed = {"trainer": trainer_bytes(settings, shape), "trainer_gpu": trainer_gpu_bytes(settings, shape, machine)}
    check_memory(shape, settings.inference, machine=machine, **(needed if trains else {}))
    return cards


def run_cards(settings: RunSettings, *, trains: bool = True) -> CardPlan:
    """The cards of engine and trainer (if `trains`) on this machine; none on a CPU. Raises InputError if `training.device` or
    another setting asks for a card that does not exist."""
    inference, training = settings.inference, settings.training
    samples = computes_on_card(inference)
    trains_on_card = trains and training.device != "cpu" and torch_cuda() is not None
    cards = usable_cards(inference, on_card=samples or trains_on_card)
    if trains and training.device == "cuda" and not has_cuda():
        raise InputError("training.device is 'cuda' but torch has no GPU here: set training.device to 'auto' or 'cpu'")
    if trains and training.attention == "flex" and (training.device == "cpu" or not has_cuda()):
        raise InputError(
            "training.attention is 'flex', which has a gradient on a GPU only, and the trainer computes on the CPU: set "
            "training.attention to 'ranges'"
        )
    return plan_cards(
        cards,
        engine=inference.cards if samples else None,
        tensor_parallel=inference.tensor_parallel,
        processes=training.processes if trains_on_card else 0,
    )


def model_here(name: str) -> Path | None:
    """Folder of a model or earlier download; None for a hub id that is not downloaded. Raises InputError if `name` is neither,
    or as `resolve_model`."""
    if Path(name).is_dir() or not may_be_hub_id(name):
        return resolve_model(name)
    folder = downloaded(name)
    return None if folder is None or not has_weights(folder) else resolve_model(folder)


def model_for_plan(settings: RunSettings) -> Path | None:
    """Like `model_folder`; for a model that is not downloaded, raises InputError if the hub lacks it or does not answer."""
    folder = model_folder(settings, settings.runs_root)
    if folder is None and settings.inference.model != TINY:
        ask_hub(settings.inference.model)
    return folder


def model_of(settings: RunSettings, runs_root: Path, run: str) -> Path:
    """Folder of the run's base model; raises InputError if it is gone, or differs from the one that the run started with."""
    folder = model_folder(settings, runs_root)
    if folder is None:
        raise InputError(f"the model '{settings.inference.model}' of run '{run}' is gone from this machine: restore it")
    check_base(RunPaths(runs_root / run), folder)
    return folder.resolve()


def model_folder(settings: RunSettings, runs_root: Path) -> Path | None:
    """None if the model is not on this machine."""
    name = settings.inference.model
    return find_tiny(runs_root / MODEL_FOLDER, settings.tiny_model, settings.prompts) if name == TINY else model_here(name)


def model_or_none(settings: RunSettings, runs_root: Path, run: str) -> Path | None:
    try:
        return model_of(settings, runs_root, run)
    except InputError:
        return None


def tiny_shape(recipe: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> ModelShape:
    """The shape of the model that `recipe` makes, with its full vocabulary. A test compares it with a real one."""
    hidden, width = recipe.hidden, 32
    shape = ModelShape(
        family="qwen3",
        layers=recipe.layers,
        hidden=hidden,
        inner=3 * hidden,
        heads=hidden // width,
        key_value_heads=max(1, hidden // (2 * width)),
        head_width=width,
        parameters=0,
        stored="float32",
        positions=longest_sequence(prompts),
    )
    norms = recipe.layers * 2 * (hidden + width) + hidden
    return replace(shape, parameters=TINY_VOCABULARY * hidden + shape.linear_parameters + norms)


def model_shape(name: str, recipe: TinyModelSettings, prompts: PromptSettings) -> ModelShape | None:
    """The shape of the model; None if it is not downloaded. Raises InputError as `model_here`, or for an unknown family or
    incomplete config."""
    if name == TINY:
        return tiny_shape(recipe, prompts)
    folder = model_here(name)
    return None if folder is None else read_shape(folder)


def shape_of(settings: RunSettings) -> ModelShape | None:
    return model_shape(settings.inference.model, settings.tiny_model, settings.prompts)


def check_length(settings: InferenceSettings, positions: int | None, name: str) -> None:
    """Raise InputError if inference.max_model_length exceeds `positions`, the model's longest sequence (None: unknown)."""
    if positions is not None and settings.max_model_length > positions:
        raise InputError(
            f"inference.max_model_length {settings.max_model_length} exceeds the {positions} positions of model '{name}' "
            "(max_position_embeddings in its config.json; with longrope, original_max_position_embeddings): lower it"
        )


def trainer_bytes(settings: RunSettings, shape: ModelShape | None, machine: Machine | None = None) -> int:
    """Lower bound of the trainer's main memory, bytes; with `machine`, including a full micro-batch. 0 for an unknown shape."""
    if shape is None:
        return 0
    training = settings.training
    on_cpu = machine is not None and (machine.trainer_gpu[1] == 0 or training.device == "cpu")
    return trainer_memory(shape, tokens=(training.token_budget or CPU_TOKENS) if on_cpu else 0, **_memory_of(training))


def trainer_gpu_bytes(settings: RunSettings, shape: ModelShape | None, machine: Machine) -> int:
    """Lower bound of the trainer's GPU memory for one micro-batch, bytes; 0 without a GPU or if the shape is unknown."""
    training = settings.training
    if shape is None or not machine.trainer_gpu[1] or training.device == "cpu":
        return 0
    tokens = training.token_budget or settings.inference.max_model_length
    return trainer_gpu_memory(shape, tokens=tokens, parts=_parts_of_base(training), **_memory_of(training))


def _memory_of(training: TrainingSettings) -> dict[str, Any]:
    """What decides the memory of a trainer, beside the model and the tokens of a micro-batch."""
    return {
        "rank": training.lora_rank,
        "dtype": training.dtype,
        "targets": training.lora_targets,
        "recompute": training.gradient_checkpointing,
    }


def _parts_of_base(training: TrainingSettings) -> int:
    """With FSDP2 one for each process, on all machines of torchrun; else 1."""
    machines = os.environ.get("PET_NNODES", "1").rpartition(":")[2]
    return training.processes * int(machines) if training.fsdp and machines.isdecimal() else 1


def token_budget(settings: RunSettings, shape: ModelShape, cards: CardPlan) -> int:
    """Unique tokens of the trainer's micro-batches: the setting, else on a GPU `GPU_TOKENS` or the largest half, quarter, ... of
    it that fits into the trainer's part of its card; 0 without a GPU. One that does not fit would cost each run an
    out-of-memory error in its first step.
    """
    training = settings.training
    if training.token_budget or not cards.trainer:
        return training.token_budget
    total = min(card.total for card in cards.trainer)
    room = int(total * trainer_share(cards, settings.inference)) or total - CONTEXT_BYTES

    def needed(tokens: int) -> int:
        return trainer_gpu_memory(shape, tokens=tokens, parts=_parts_of_base(training), **_memory_of(training))

    return next((tokens for tokens in (GPU_TOKENS >> halved for halved in range(5)) if needed(tokens) <= room), GPU_TOKENS >> 4)
