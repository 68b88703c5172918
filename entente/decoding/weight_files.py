"""The weight files of a model and their headers. This module does not read the weights.

A model has `model.safetensors`, or the shards that `model.safetensors.index.json` names. No engine loads other files of the
folder, such as `consolidated.safetensors`, `original/` or `pytorch_model.bin`, so they are neither counted nor hashed nor copied.
A folder with the config of an adapter is refused, because transformers would load its weights too.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import LARGEST_RESULT, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED = ("quantization_config", "compression_config")
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that older quantisation tools write instead."""
_ADAPTER = "adapter_config.json"
_GIVE = "give it in float32, bfloat16 or float16, in which trainer and engines compute"
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    format: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """Weight files, sorted by name. Raises InputError for none, a missing shard, or a single file beside shards."""
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
    """Whether all weight files are there; a download may lack some."""
    try:
        return bool(weight_files(folder))
    except InputError:
        return False


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor by name, from the file headers. Raises as `weight_files`, and InputError if a file is truncated or damaged."""
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
    """Raise InputError if the model is quantised, a weight has an unsupported dtype, or the folder also holds an adapter; or see
    `stored_tensors`."""
    check_not_quantised(str(folder), config)
    if (folder / _ADAPTER).exists():  # transformers would apply it, vLLM would not, and the model's identity has no hash of it
        raise InputError(
            f"model '{folder}' has an {_ADAPTER} beside its weights, so transformers would compute another model than vLLM: "
            "merge the adapter into the weights, or give a copy of the folder without the adapter's files"
        )
    if file := next((name for name in _QUANTISED_FILES if (folder / name).is_file()), ""):
        check_not_quantised(str(folder), {_QUANTISED[0]: {"quant_method": f"by {file}"}})
    if (named := _named_format(config)) not in (None, *_FORMATS.values()):
        raise InputError(f"model '{folder}' has dtype {named!r} in its config.json: {_GIVE}")
    for name, tensor in stored_tensors(folder).items():
        if tensor.format not in _FORMATS and len(tensor.shape) > 1:  # buffers of integers are vectors
            raise InputError(f"model '{folder}' stores '{name}' as {tensor.format}: {_GIVE}")


def load_whole(load: Callable[..., Any], folder: Path, *, named: Path | None = None, **options: Any) -> Any:
    """The network that `load`, a `from_pretrained` of transformers, reads from `folder`. Raises InputError, which says `named`,
    if weights are missing: transformers only warns, and makes up random ones."""
    network, report = load(folder, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"model '{named or folder}' lacks {len(missing)} of its weights, such as '{missing[0]}': copy or download it again"
        )
    return network


def check_not_quantised(model: str, config: Mapping[str, Any]) -> None:
    quantised = next((config[name] for name in _QUANTISED if config.get(name)), None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise InputError(
            f"model '{model}' is quantised ({method or 'method unknown'}), but training and sampling need unquantised weights: "
            "use the original model"
        )


def stored_format(folder: Path, config: Mapping[str, Any]) -> str:
    """The dtype 'auto' of a model, such as 'bfloat16': that of its config, else of its first weight."""
    if named := _named_format(config):
        return named
    return next((_FORMATS[tensor.format] for tensor in stored_tensors(folder).values() if tensor.format in _FORMATS), "float32")


def _named_format(config: Mapping[str, Any]) -> str | None:
    named = config.get("dtype") or config.get("torch_dtype")
    return None if named is None else str(named).removeprefix("torch.")


def usual_mode(file: Path) -> None:
    """Set the umask's default mode: safetensors creates files that only the owner can read."""
    beside = file.with_name(f".{file.name}.mode")
    try:
        beside.touch()
        file.chmod(beside.stat().st_mode & 0o777)
    finally:
        beside.unlink(missing_ok=True)
