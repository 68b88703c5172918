"""The weight files of a model: which belong to it, and what their headers say. The weights themselves are not read here.

A model has `model.safetensors`, or the shards that `model.safetensors.index.json` names. No engine loads anything else in its
folder, such as `consolidated.safetensors`, `original/` or `pytorch_model.bin`, so it is neither counted nor hashed nor copied.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import LARGEST_RESULT, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Number formats of a safetensors header in which trainer and engines compute -> their names in torch."""
_QUANTISED = ("quantization_config", "compression_config")
"""Entries of a quantised model's config.json."""
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that older tools write beside a quantised model instead."""
_GIVE = "give it in float32, bfloat16 or float16, in which trainer and engines compute"
_MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file, set by the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a header describes it."""

    format: str
    """Number format, such as 'BF16'."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """Files with the model's weights, sorted by name.

    Raises:
        InputError: there are none, a shard is missing, or two files claim to hold the model.
    """
    whole, index = folder / WEIGHTS, folder / INDEX
    if not index.is_file():
        if not whole.is_file():
            raise InputError(
                f"model '{folder}' has no {WEIGHTS}: save it with `save_pretrained`, or convert a GGUF file with "
                "`entente model fetch`"
            )
        return [whole]
    named = read_json_object(index, at_most=LARGEST_RESULT, what="model's file").get("weight_map")
    if not isinstance(named, Mapping) or not named or not all(isinstance(name, str) for name in named.values()):
        raise InputError(f"'{index}' names no weight files: copy or download it again")
    files = [folder / name for name in sorted(set(named.values()))]
    if missing := next((file.name for file in files if not file.is_file()), ""):
        raise InputError(f"model '{folder}' lacks '{missing}', which its {INDEX} names: copy or download it again")
    if whole.is_file() and whole not in files:
        raise InputError(f"model '{folder}' has both {WEIGHTS} and the shards of {INDEX}: remove the one that is not the model")
    return files


def has_weights(folder: Path) -> bool:
    """Whether all weight files of a model are there; a download may lack some."""
    try:
        return bool(weight_files(folder))
    except InputError:
        return False


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model by its name, from the headers of its files, whose lengths are compared with them.

    Raises:
        InputError: see `weight_files`; or a file is cut or damaged.
    """
    return {name: tensor for file in weight_files(folder) for name, tensor in _header(file).items()}


def _header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header: Mapping[str, Any] = json.loads(stream.read(length)) if length < min(size, _MAX_HEADER_BYTES) else {}
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            wanted = 8 + length + max(entry["data_offsets"][1] for entry in tensors.values())
            stored = {name: StoredTensor(format=each["dtype"], shape=tuple(each["shape"])) for name, each in tensors.items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            wanted, stored = -1, {}
    if wanted != size:
        short = f"it has {size:,} bytes and its header says {wanted:,}" if wanted > 0 else "its header cannot be read"
        raise InputError(f"model file '{file}' is cut or damaged ({short}): copy or download it again")
    return stored


def check_computed(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that trainer and engines compute with the model's weights as they are stored.

    Raises:
        InputError: the model is quantised, or a weight has another number format; or see `stored_tensors`.
    """
    check_not_quantised(str(folder), config)
    if file := next((name for name in _QUANTISED_FILES if (folder / name).is_file()), ""):
        check_not_quantised(str(folder), {_QUANTISED[0]: {"quant_method": f"by {file}"}})
    if (named := _named_format(config)) not in (None, *_FORMATS.values()):
        raise InputError(f"model '{folder}' has dtype {named!r} in its config.json: {_GIVE}")
    for name, tensor in stored_tensors(folder).items():
        if tensor.format not in _FORMATS and len(tensor.shape) > 1:  # buffers of integers are vectors
            raise InputError(f"model '{folder}' stores '{name}' as {tensor.format}: {_GIVE}")


def check_not_quantised(model: str, config: Mapping[str, Any]) -> None:
    """Refuse a quantised model, by its config.

    Raises:
        InputError: names the method.
    """
    quantised = next((config[name] for name in _QUANTISED if config.get(name)), None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise InputError(
            f"model '{model}' is quantised ({method or 'method unknown'}), and adapters are trained and drawn on whole weights: "
            "give the model that it was made from"
        )


def stored_format(folder: Path, config: Mapping[str, Any]) -> str:
    """The number format that dtype 'auto' means for a model, such as 'bfloat16': its config's, else its first weight's."""
    if named := _named_format(config):
        return named
    return next((_FORMATS[tensor.format] for tensor in stored_tensors(folder).values() if tensor.format in _FORMATS), "float32")


def _named_format(config: Mapping[str, Any]) -> str | None:
    named = config.get("dtype") or config.get("torch_dtype")
    return None if named is None else str(named).removeprefix("torch.")


def usual_mode(file: Path) -> None:
    """Give a file the mode of any new one: safetensors writes for the owner alone, and others may share the folder."""
    beside = file.with_name(f".{file.name}.mode")
    try:
        beside.touch()
        file.chmod(beside.stat().st_mode & 0o777)
    finally:
        beside.unlink(missing_ok=True)
