"""Supported model families, and the linear layers that an adapter may change (LoRA targets).

Reads a model's config without torch. Other families raise an InputError; docs/extending.md shows how to add one."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.decoding.model_files import longest_position, read_config
from entente.telemetry.errors import InputError

Layers = dict[str, tuple[int, int]]
"""Path of a linear layer, such as 'self_attn.q_proj' -> (out features, in features)."""
_BLOCK = "model.layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: str
    """`model_type` of the config, a key of `FAMILIES`."""
    layers: int
    hidden: int
    inner: int
    """Intermediate size of the feed-forward layers; in a mixture of experts, summed over the active experts of a token."""
    heads: int
    key_value_heads: int
    head_width: int
    positions: int
    """Longest sequence, tokens; see `longest_position`."""

    @property
    def has_experts(self) -> bool:
        return FAMILIES[self.family].experts

    def targets(self, wanted: Collection[str] = ()) -> tuple[str, ...]:
        """Linear layers that an adapter changes, such as 'q_proj', in block order. `wanted`: `training.lora_targets`; empty: all.
        Raises InputError if the family does not support a name."""
        family = FAMILIES[self.family]
        offered = tuple(path.rpartition(".")[2] for path in family.linear(self))
        unknown = [name for name in wanted if name not in offered]
        if unknown:
            reason = f" ({family.withheld})" if family.withheld else ""
            raise InputError(
                f"training.lora_targets names '{unknown[0]}', but a model of the family '{self.family}' offers only "
                f"{', '.join(offered)}{reason}: choose from these, or leave it empty for all"
            )
        return tuple(name for name in offered if not wanted or name in wanted)

    def linear_layers(self, wanted: Collection[str] = ()) -> Layers:
        names = self.targets(wanted)
        shapes = {path: shape for path, shape in FAMILIES[self.family].linear(self).items() if path.rpartition(".")[2] in names}
        return {f"{_BLOCK}.{block}.{path}": shape for block in range(self.layers) for path, shape in shapes.items()}

    @property
    def linear_parameters(self) -> int:
        return sum(out * into for out, into in self.linear_layers().values())

    def lora_parameters(self, rank: int, wanted: Collection[str] = ()) -> int:
        return rank * sum(sum(shape) for shape in self.linear_layers(wanted).values())


def _attention(sizes: Architecture) -> Layers:
    queries, keys = sizes.heads * sizes.head_width, sizes.key_value_heads * sizes.head_width
    return {
        "self_attn.q_proj": (queries, sizes.hidden),
        "self_attn.k_proj": (keys, sizes.hidden),
        "self_attn.v_proj": (keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, queries),
    }


def _dense(sizes: Architecture) -> Layers:
    return _attention(sizes) | {
        "mlp.gate_proj": (sizes.inner, sizes.hidden),
        "mlp.up_proj": (sizes.inner, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.inner),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    linear: Callable[[Architecture], Layers]
    """Linear layers of one block that an adapter may change, by path within the block."""
    head_width: int | None = None
    """Default head width; None: hidden size / heads."""
    norms: int = 2
    """Norms of a block over the residual stream; the memory plan counts their inputs."""
    head_norms: bool = False
    experts: bool = False
    withheld: str = ""
    """Why other linear layers are not supported, as part of a sentence."""
    tokenizer: str = ""
    """Default tokenizer class of transformers; empty: tokenizer.json alone."""
    same_tokenizer: bool = False
    """Whether transformers ignores a `tokenizer_class` in the files."""


FAMILIES: dict[str, Family] = {
    "gemma3_text": Family(linear=_dense, head_width=256, norms=4, head_norms=True, tokenizer="GemmaTokenizer"),
    "llama": Family(linear=_dense),
    "mistral": Family(linear=_dense, same_tokenizer=True),
    "qwen2": Family(linear=_dense, tokenizer="Qwen2Tokenizer", same_tokenizer=True),
    "qwen3": Family(linear=_dense, head_width=128, head_norms=True, tokenizer="Qwen2Tokenizer"),
    "qwen3_moe": Family(
        linear=_attention,
        tokenizer="Qwen2Tokenizer",
        head_norms=True,
        experts=True,
        withheld="its feed-forward weights are one tensor for all experts, on which neither peft nor vLLM has a plain LoRA layer",
    ),
}

_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Config options that the trainer does not implement; they must be off."""


def read_architecture(folder: Path) -> Architecture:
    return architecture_of(read_config(folder), str(folder))


def architecture_of(config: Mapping[str, Any], model: str) -> Architecture:
    """The architecture of a model with this config; `model` is for messages. Raises InputError if the family is unknown, an
    option is not supported, or a size is missing."""
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or family is None:
        raise InputError(
            f"model '{model}' is of the family {name!r}, and Entente knows {', '.join(sorted(FAMILIES))}: choose one of these, "
            "or add the family as docs/extending.md shows ('A LoRA target')"
        )
    used = [option for option in _UNSUPPORTED if config.get(option)]
    if used:
        raise InputError(f"model '{model}' uses {', '.join(used)}, which the trainer does not compute: choose another model")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        if family.experts:
            inner = int(config["moe_intermediate_size"]) * int(config["num_experts_per_tok"])
        else:
            inner = int(config["intermediate_size"])
        architecture = Architecture(
            family=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=inner,
            heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or family.head_width or hidden // heads),
            positions=longest_position(config),
        )
        if (
            min(
                architecture.layers,
                architecture.hidden,
                architecture.inner,
                architecture.heads,
                architecture.key_value_heads,
                architecture.head_width,
            )
            < 1
        ):
            raise ValueError("a size is not positive")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"the config.json of model '{model}' does not describe a model of the family '{name}' "
            f"({type(error).__name__}: {error}): give the folder of a complete model"
        ) from error
    return architecture
