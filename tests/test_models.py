"""Each folder in `models/` is a small policy that can be played, with a card, and is what its recipe says."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from entente.decoding.model_files import RECIPE, recipe_prompts, resolve_model
from entente.evaluation.adapter_folders import is_adapter
from entente.inference.adapter_check import check_adapter
from entente.inference.torch_model import TorchModel
from entente.records.policy_version import version_in
from entente.reports.publish import CARD, MOST_BYTES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path for path in (ROOT / "models").glob("*") if path.is_dir())
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152
)
"""The shape of the base that `entente model fetch smollm2` brings."""


def check_model(folder: Path) -> None:
    """Check one published folder."""
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
    recipe = json.loads((folder / RECIPE).read_text())
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert recipe["files"] == {name: digest for name, digest in found.items() if name not in (RECIPE, CARD)}
    assert recipe_prompts(folder) is not None
    assert f"# {folder.name}\n" in (folder / CARD).read_text()
    if not is_adapter(folder):
        TorchModel(resolve_model(folder), "float32", torch.device("cpu"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_model_is_small_whole_and_what_its_recipe_says(folder: Path):
    check_model(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_paths_of_a_card_are_those_of_the_repository(folder: Path):
    named = re.findall(r"\./[\w/.-]+", (folder / CARD).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_published_adapter_fits_its_base(tmp_path: Path):
    SMOLLM2.save_pretrained(tmp_path)
    assert not check_adapter(version_in(ROOT / "models" / "smollm2", 1), tmp_path, max_rank=8).is_zero
