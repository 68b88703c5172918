"""Whether an adapter may be given to an engine: looked at before any engine sees it, since a bad one in a request ends vLLM.

Promise: what passes is readable, whole, finite, plain LoRA of a rank that fits the slots, on modules that the base model has
and in their shapes, and is the one that was told by its hash. What does not is a `DataError` of one sentence that names the
file and the cure. It needs no engine, loads no base weights and changes nothing.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from records.policy_version import PolicyVersion
from telemetry.errors import DataError
from telemetry.read_file import read_regular

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_HEAD, _LARGEST_ADAPTER = 16 << 20, 64 << 30
"""Bytes of the largest config, or head of a file of weights; and of an adapter whose base model is not known."""

_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
_UNSERVED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Options of peft that change what an adapter means and that not every engine of ours follows; they must be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What was found in an adapter that may be served."""

    rank: int
    """Inner dimension of every product B @ A."""
    scale: float
    """What B @ A counts when it is added to a weight."""
    modules: tuple[str, ...]
    """Kinds of linear layer that it changes, sorted, such as 'q_proj'."""
    bytes: int
    """Size of both files together."""


def adapter_hash_of(folder: Path) -> str:
    """32 hex digits over both files of the adapter in `folder`, as publishing computes them.

    Raises:
        DataError: a file is missing, cannot be read, or is no regular file.
    """
    return _hash(*(_read(folder / name, _LARGEST_ADAPTER) for name in (CONFIG_FILE, WEIGHTS_FILE)))


def _hash(config: bytes, weights: bytes) -> str:
    digests = (hashlib.sha256(content).hexdigest() for content in (config, weights))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _read(file: Path, at_most: int) -> bytes:
    try:
        # Links are resolved first, so that one which is put there afterwards is not followed.
        return read_regular(file.resolve(), at_most=at_most, what="adapter file", follow_links=False, error=DataError)
    except DataError as error:
        raise DataError(f"{error}: publish the adapter again") from error


def version_in(folder: Path, version: int) -> PolicyVersion:
    """The adapter in `folder` as policy version `version`, with the hash of its files; raises as `adapter_hash_of`."""
    return PolicyVersion(version=version, adapter_hash=adapter_hash_of(folder), adapter=folder)


def check_adapter(policy: PolicyVersion, base: Path, max_rank: int) -> AdapterFacts:
    """Check the adapter of `policy` against its hash, the base model in `base` and slots of rank `max_rank`.

    Raises:
        DataError: it cannot be served; the sentence says which file is at fault and what to do.
    """
    folder = policy.folder
    shapes, layers = linear_shapes(base)
    largest = 4 * max_rank * layers * sum(sum(shape) for shape in shapes.values()) + _LARGEST_HEAD
    config, weights = _read(folder / CONFIG_FILE, _LARGEST_HEAD), _read(folder / WEIGHTS_FILE, largest)
    found = _hash(config, weights)
    if found != policy.adapter_hash:
        raise DataError(
            f"adapter '{folder}' has the hash {found}, not {policy.adapter_hash} as told: it was changed or cut after "
            "publishing, so publish its policy version again"
        )
    rank, scale = _read_config(folder / CONFIG_FILE, config)
    if rank > max_rank:
        raise DataError(
            f"adapter '{folder}' has rank {rank} but the engine's slots take rank {max_rank}: "
            f"start the engine with a slot rank of {rank} or more, or train with a lower training.lora_rank"
        )
    kinds = _check_weights(folder / WEIGHTS_FILE, weights, rank, base)
    return AdapterFacts(rank=rank, scale=scale, modules=tuple(sorted(kinds)), bytes=len(config) + len(weights))


def _read_config(file: Path, content: bytes) -> tuple[int, float]:
    """Rank and scale of a plain LoRA, from the `content` of `file`."""
    config = _json_object(file, content, "publish the adapter again")
    rank, alpha, rooted = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    if config.get("peft_type") != "LORA":
        raise DataError(f"'{file}' is of the kind {config.get('peft_type')!r}: only LORA adapters are served")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not (rank > 0 and alpha > 0):
        raise DataError(f"'{file}' has r {rank!r} and lora_alpha {alpha!r}: both must be positive numbers, so publish it again")
    switched_on = [name for name in _UNSERVED if config.get(name)]
    if config.get("bias", "none") != "none":
        switched_on.append("bias")
    if switched_on:
        raise DataError(f"'{file}' uses {', '.join(switched_on)}, which the engines do not follow: train a plain LoRA adapter")
    return rank, alpha / (rank**0.5 if rooted else rank)


def _check_weights(file: Path, content: bytes, rank: int, base: Path) -> set[str]:
    """The kinds of module in the `content` of `file`, whose every pair of matrices fits the base model."""
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DataError(f"adapter file '{file}' is no whole safetensors file ({error}): publish the adapter again") from error
    shapes, layers = linear_shapes(base)
    kinds, pairs = set(), {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in shapes or int(match[2]) >= layers:
            raise DataError(
                f"adapter file '{file}' changes '{name}', which the base model '{base}' does not have: "
                "it was trained on another base, or on modules that are not served"
            )
        out_features, in_features = shapes[match[3]]
        fitting = (rank, in_features) if match[4] == "A" else (out_features, rank)
        if tuple(tensor.shape) != fitting:
            raise DataError(
                f"adapter file '{file}' has shape {tuple(tensor.shape)} for '{name}', but rank {rank} on the base model '{base}' "
                f"makes it {fitting}: it was trained on another base"
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise DataError(f"adapter file '{file}' holds values that are no finite numbers in '{name}': train that step again")
        kinds.add(match[3])
        pairs.setdefault(match[1], set()).add(match[4])
    _check_pairs(file, pairs)
    return kinds


def _check_pairs(file: Path, pairs: dict[str, set[str]]) -> None:
    halves = sorted(module for module, sides in pairs.items() if len(sides) == 1)
    if halves or not pairs:
        lacking = f"half of the pair for '{halves[0]}'" if halves else "any weights"
        raise DataError(f"adapter file '{file}' lacks {lacking}: publish the adapter again")


def linear_shapes(base: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """(out, in) features of each kind of linear layer in a block of the Llama family (Qwen2, Qwen3), and how many blocks."""
    cure = "give the folder of a whole model"
    content = read_regular(base / "config.json", at_most=_LARGEST_HEAD, what="model's config", error=DataError)
    config = _json_object(base / "config.json", content, cure)
    try:
        hidden, inner, heads = (int(config[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        head = int(config.get("head_dim") or hidden // heads)
        shared = int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(
            f"'{base / 'config.json'}' does not describe a model of the Llama family ({error}): adapters for it cannot be checked"
        ) from error
    return {
        "q_proj": (heads * head, hidden),
        "k_proj": (shared * head, hidden),
        "v_proj": (shared * head, hidden),
        "o_proj": (hidden, heads * head),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }, layers


def _json_object(file: Path, content: bytes, cure: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{file}' cannot be read ({error}): {cure}") from error
    if not isinstance(found, dict):
        raise DataError(f"'{file}' holds no JSON object: {cure}")
    return found
