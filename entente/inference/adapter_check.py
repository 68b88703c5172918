"""Checks an adapter before an engine loads it, because a bad adapter crashes vLLM.

An accepted adapter is readable, complete and finite; plain LoRA whose rank fits the engine's slots; its matrices fit the base, by
the base's config; its files have the expected hash. Any other is refused with a `DataError` that names file and cure.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from entente.decoding.architectures import Layers, read_architecture
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PolicyVersion, combined_hash, lora_scale
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.read_file import read_regular

_MAX_CONFIG_BYTES = 16 << 20
"""Largest config or weight file header."""

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of peft's `init_lora_weights` that keep the base. With others peft subtracts the initial B @ A; no engine does."""
_DESCRIBING = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "task_type")
_CHOOSING_LAYERS = ("ensure_weight_tying", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules")
_TRAINING_ALONE = ("corda_config", "eva_config", "loftq_config", "lora_dropout", "lora_ga_config")
_IDLE = ("fan_in_fan_out", "megatron_core", "qalora_group_size")  # no effect without another option, or on linear layers
_READ_HERE = ("bias", "init_lora_weights", "lora_alpha", "r", "use_rslora")
_PLAIN_OPTIONS = frozenset((*_DESCRIBING, *_CHOOSING_LAYERS, *_TRAINING_ALONE, *_IDLE, *_READ_HERE))
"""peft options with which an adapter only adds scale * B @ A to linear layers; all others must be off."""
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SAVE_AGAIN = "save the adapter in float32, bfloat16 or float16, in which engines compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    scale: float
    """Factor of B @ A when it is added to a weight."""
    is_zero: bool
    """The adapter changes nothing: each product B @ A has a zero factor."""


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(file, at_most=max_bytes, what="adapter file", error=DataError)
    except DataError as error:
        raise DataError(f"{error}: save the adapter again") from error


def check_adapter(policy: PolicyVersion, base: Path, max_rank: int) -> AdapterFacts:
    """Check the adapter's hash and fit to the model in `base` and slots of rank `max_rank`. Raises DataError if it fails."""
    folder = policy.folder
    try:
        architecture = read_architecture(base)
    except InputError as error:
        raise DataError(f"adapter '{folder}' cannot be checked: {error}") from error
    largest = 4 * architecture.lora_parameters(max_rank) + _MAX_CONFIG_BYTES
    config, weights = _read(folder / ADAPTER_CONFIG, _MAX_CONFIG_BYTES), _read(folder / ADAPTER_WEIGHTS, largest)
    actual_hash = combined_hash(hashlib.sha256(content).hexdigest() for content in (config, weights))
    if actual_hash != policy.adapter_hash:
        raise DataError(
            f"adapter '{folder}' has the hash {actual_hash}, not {policy.adapter_hash}: its files changed after publishing, so "
            "publish its policy version again"
        )
    rank, scale = _read_config(folder / ADAPTER_CONFIG, config)
    if rank > max_rank:
        raise DataError(
            f"adapter '{folder}' has rank {rank} but the engine's slots take rank {max_rank}: "
            f"start the engine with a slot rank of {rank} or more, or train with a lower training.lora_rank"
        )
    is_zero = _check_weights(folder / ADAPTER_WEIGHTS, weights, rank, base, architecture.linear_layers())
    return AdapterFacts(scale=scale, is_zero=is_zero)


def _read_config(file: Path, content: bytes) -> tuple[int, float]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{file}' cannot be read ({error}): save the adapter again") from error
    if not isinstance(config, dict):
        raise DataError(f"'{file}' is not a JSON object: save the adapter again")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise DataError(f"'{file}' has peft_type {config.get('peft_type')!r}: only LORA adapters are served")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not (rank > 0 and 0 < alpha < math.inf):
        raise DataError(f"'{file}' has r {rank!r} and lora_alpha {alpha!r}: both must be positive numbers, so save it again")
    used = sorted(name for name, value in config.items() if value and name not in _PLAIN_OPTIONS)
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise DataError(f"'{file}' uses {', '.join(used)}, which the engines do not support: train a plain LoRA adapter")
    start = config.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
        raise DataError(
            f"'{file}' has init_lora_weights {start!r}, so it was trained on a changed base, which the engines do not have: "
            "have peft convert it (`save_pretrained` with `path_initial_model_for_weight_conversion`), or train with the default"
        )
    return rank, lora_scale(rank, alpha, root=bool(config.get("use_rslora")))


def _check_weights(file: Path, content: bytes, rank: int, base: Path, shapes: Layers) -> bool:
    """Check that every matrix of the weight file fits the base model; returns whether every product is zero."""
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DataError(f"adapter file '{file}' is not a complete safetensors file ({error}): save the adapter again") from error
    except KeyError as error:  # a number format that torch has no name for
        raise DataError(f"adapter file '{file}' has weights in {error}: {_SAVE_AGAIN}") from error
    pairs, zero = dict[str, set[str]](), set[str]()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in shapes:
            served = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in shapes))
            raise DataError(
                f"adapter file '{file}' changes '{name}', which is none of the layers of the base model '{base}' that an adapter "
                f"may change ({served}): it was trained on another base model, or with other target modules"
            )
        out_features, in_features = shapes[match[1]]
        expected_shape = (rank, in_features) if match[2] == "A" else (out_features, rank)
        if tuple(tensor.shape) != expected_shape:
            raise DataError(
                f"adapter file '{file}' has shape {tuple(tensor.shape)} for '{name}', but rank {rank} on the base model '{base}' "
                f"requires {expected_shape}: it was trained on another base model"
            )
        if tensor.dtype not in _COMPUTED:
            raise DataError(f"adapter file '{file}' has '{name}' in {str(tensor.dtype).removeprefix('torch.')}: {_SAVE_AGAIN}")
        if not torch.isfinite(tensor).all():
            raise DataError(f"adapter file '{file}' has values that are not finite in '{name}': train that step again")
        pairs.setdefault(match[1], set()).add(match[2])
        if not tensor.any():
            zero.add(match[1])
    _check_pairs(file, pairs)
    return len(zero) == len(pairs)


def _check_pairs(file: Path, pairs: dict[str, set[str]]) -> None:
    halves = sorted(module for module, sides in pairs.items() if len(sides) == 1)
    if halves or not pairs:
        lacking = f"half of the pair for '{halves[0]}'" if halves else "any weights"
        raise DataError(f"adapter file '{file}' lacks {lacking}: save the adapter again")
