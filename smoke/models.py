"""The model of a smoke test: a given one, the product's tiny one, or random weights in the shape of a real one."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.trainer_cases import QWEN_7B, Shape, model_of
from decoding.architectures import read_architecture
from decoding.model_files import eos_token_id, read_config, resolve_model
from inference.adapter_check import CONFIG_FILE, version_in
from inference.calibrate import write_random_adapter
from records.policy_version import PolicyVersion
from smoke.job import Job
from storage.runs import MODEL_FOLDER
from telemetry.progress import reporter
from training.settings import TinyModelSettings
from training.tiny_model import make_tiny_model

RANK = 16
"""Rank of the adapters."""
_SHAPES = {
    "qwen2.5-1.5b": replace(QWEN_7B, hidden=1536, heads=12, kv_heads=2, intermediate=8960, vocabulary=151_936, tied=True),
    "qwen2.5-7b": QWEN_7B,
}
TINY = TinyModelSettings(source_games=8, imitation_steps=30, imitation_positions=3)
"""The product's tiny model, taught in seconds: it need not play well."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_MOVED = 0.2
"""Size of what an adapter adds to a layer's output, where the layer's input has unit size: enough to change what is drawn."""


def model_folder(job: Job) -> Path:
    """The folder of the job's model, which is made if it is missing.

    Raises:
        InputError: the model that was given cannot be used.
    """
    if job.model:
        return resolve_model(job.model)
    if job.shape == "tiny":
        return make_tiny_model(job.runs / MODEL_FOLDER, TINY, reporter().stage)
    return _random_model(job.folder / job.shape, _SHAPES[job.shape], job)


def _random_model(folder: Path, shape: Shape, job: Job) -> Path:
    """Random weights, with the tokenizer of a tiny model: prompts are games', completions mean nothing."""
    if (folder / "tokenizer.json").is_file():  # written last
        return folder
    import torch

    words = make_tiny_model(job.runs / MODEL_FOLDER, TINY, reporter().stage)
    shutil.rmtree(folder, ignore_errors=True)
    model = model_of(shape, device=job.device, dtype=getattr(torch, job.dtype))
    if not shape.tied:
        with torch.no_grad():
            model.lm_head.weight.mul_(4)  # else legal tokens are all but equally likely, and a wrong mask is hardly seen
    model.config.eos_token_id, model.config.bos_token_id = eos_token_id(words), None
    model.save_pretrained(str(folder), max_shard_size="4GB")
    for name in reversed(_TOKENIZER):
        if (words / name).is_file():
            shutil.copyfile(words / name, folder / name)
    return folder


def shape_of(folder: Path) -> Shape:
    """The sizes of the model in `folder`."""
    config, sizes = read_config(folder), read_architecture(folder)
    return Shape(
        family=sizes.family,
        hidden=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.key_value_heads,
        head_dim=sizes.head_width,
        intermediate=sizes.inner,
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def random_policy(job: Job, model: Path, version: int) -> PolicyVersion:
    """Policy version `version` with random weights; the same for the same number."""
    import torch

    folder = job.folder / "adapters" / f"{model.name}-{version}"
    if not (folder / CONFIG_FILE).is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(version)
        hidden = read_architecture(model).hidden
        write_random_adapter(folder, model, RANK, math.sqrt(_MOVED / math.sqrt(hidden * RANK)))
    return version_in(folder, version)
