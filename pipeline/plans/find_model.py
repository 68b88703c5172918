"""Where a run's model lies and how large it is, told without loading, making or fetching it.

Promise: loads neither torch nor Prefect, and fetches nothing: of a hub id it finds only what was fetched before. A plan asks the
hub whether it has the rest.
"""

from pathlib import Path

from decoding.model_files import ask_hub, may_be_hub_id, resolve_model
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from inference.memory_plan import (
    Machine,
    ModelShape,
    check_memory,
    has_cuda,
    read_shape,
    this_machine,
    trainer_gpu_memory,
    trainer_memory,
)
from inference.settings import InferenceSettings
from pipeline.run_settings import MODEL_FOLDER, RunSettings
from telemetry.errors import InputError
from training.recipe import find_tiny, longest_sequence
from training.settings import CPU_TOKENS, TinyModelSettings

TINY = "tiny"
"""The model that is made on the spot."""


def check_room(settings: RunSettings, *, trains: bool) -> None:
    """Refuse a model and a cache that cannot fit this machine; a model that must be fetched first is not known yet.

    Raises:
        InputError: with what is needed and what to lower.
    """
    if trains:
        check_device(settings.training.device)
    shape = model_shape(settings.inference.model, settings.tiny_model, settings.prompts)
    check_length(settings.inference, shape, settings.inference.model)
    machine = this_machine()
    needed = {"trainer": trainer_bytes(settings, shape), "trainer_gpu": trainer_gpu_bytes(settings, shape, machine)}
    check_memory(shape, settings.inference, machine=machine, **(needed if trains else {}))


def model_here(name: str) -> Path | None:
    """Folder of a model that lies on this machine, the hub's copies among them; None for a hub id not fetched yet.

    Raises:
        InputError: neither a folder nor a hub id, or a folder without config or tokenizer.
    """
    if Path(name).is_dir() or not may_be_hub_id(name):
        return resolve_model(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return resolve_model(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise InputError(
            f"model '{name}' is neither a folder that exists nor a hub id such as 'Qwen/Qwen2.5-7B-Instruct'"
        ) from error
    except (OSError, InputError):  # nothing of it here, or only in part
        return None


def model_for_plan(name: str) -> Path | None:
    """The same, for a plan that must not promise what is not there: a hub id that was not fetched yet is asked for.

    Raises:
        InputError: as above, or the hub does not have it or does not answer.
    """
    found = model_here(name)
    if found is None:
        ask_hub(name)
    return found


def check_device(device: str) -> None:
    """Refuse a trainer's device that is not there.

    Raises:
        InputError: it is 'cuda', and torch has no GPU here.
    """
    if device == "cuda" and not has_cuda():
        raise InputError("training.device is 'cuda' but torch has no GPU here: set training.device to 'auto' or 'cpu'")


def model_of(settings: RunSettings, runs_root: Path, run: str) -> Path:
    """The model that the run of this name under `runs_root`, with these settings, was trained on.

    Raises:
        InputError: it is not on this machine any more.
    """
    name = settings.inference.model
    found = find_tiny(runs_root / MODEL_FOLDER, settings.tiny_model, settings.prompts) if name == TINY else model_here(name)
    if found is None:
        raise InputError(f"the model '{name}' of run '{run}' is gone from this machine: restore it")
    return found.resolve()


def model_or_none(settings: RunSettings, runs_root: Path, run: str) -> Path | None:
    """The same, for who can do without it."""
    try:
        return model_of(settings, runs_root, run)
    except InputError:
        return None


def tiny_shape(recipe: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> ModelShape:
    """The shape that `recipe` gives; checked against a model that was made."""
    heads, keys = recipe.hidden // 32, max(1, recipe.hidden // 64)
    inner, width = 3 * recipe.hidden, 32
    block = 2 * recipe.hidden * heads * width + 2 * recipe.hidden * keys * width + 3 * recipe.hidden * inner
    norms = 2 * recipe.hidden + 2 * width
    parameters = recipe.vocabulary * recipe.hidden + recipe.layers * (block + norms) + recipe.hidden
    return ModelShape(
        layers=recipe.layers,
        hidden=recipe.hidden,
        inner=inner,
        heads=heads,
        key_value_heads=keys,
        head_width=width,
        parameters=parameters,
        width=4,
        positions=longest_sequence(prompts),
    )


def model_shape(name: str, recipe: TinyModelSettings, prompts: PromptSettings) -> ModelShape | None:
    """The shape of the model `name`; None where it must be fetched first, or does not tell."""
    if name == TINY:
        return tiny_shape(recipe, prompts)
    folder = model_here(name)
    return None if folder is None else read_shape(folder)


def check_length(settings: InferenceSettings, shape: ModelShape | None, name: str) -> None:
    """Refuse sequences longer than the model's.

    Raises:
        InputError: they are.
    """
    if shape is not None and settings.max_model_length > shape.positions:
        raise InputError(
            f"inference.max_model_length {settings.max_model_length} exceeds the {shape.positions} positions "
            f"of model '{name}': lower it"
        )


def trainer_bytes(settings: RunSettings, shape: ModelShape | None) -> int:
    """Main memory that the trainer's process takes at least; 0 where the shape is not known."""
    return 0 if shape is None else trainer_memory(shape, rank=settings.training.lora_rank, dtype=settings.training.dtype)


def trainer_bytes_about(settings: RunSettings, shape: ModelShape | None, machine: Machine) -> int:
    """Main memory that the trainer's process takes in a full micro-batch; 0 where the shape is not known."""
    training = settings.training
    on_gpu = machine.gpu_total > 0 and training.device != "cpu"
    return (
        0
        if shape is None
        else trainer_memory(
            shape,
            rank=training.lora_rank,
            dtype=training.dtype,
            tokens=0 if on_gpu else training.token_budget or CPU_TOKENS,
            recompute=training.recompute,
        )
    )


def trainer_gpu_bytes(settings: RunSettings, shape: ModelShape | None, machine: Machine) -> int:
    """Memory of the GPU that the trainer takes at least, for one micro-batch; 0 where it computes elsewhere."""
    training = settings.training
    if shape is None or not machine.gpu_total or training.device == "cpu":
        return 0
    return trainer_gpu_memory(
        shape,
        rank=training.lora_rank,
        dtype=training.dtype,
        tokens=training.token_budget or settings.inference.max_model_length,
        recompute=training.recompute,
    )
