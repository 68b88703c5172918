"""Each folder in `models/` is a small policy that can be played, with a card, and is what its recipe says."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from entente.decoding.model_files import RECIPE, recipe_prompts, resolve_model
from entente.inference.torch_model import TorchModel
from entente.reports.publish import CARD, MOST_BYTES

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path for path in (ROOT / "models").glob("*") if path.is_dir())


def check_model(folder: Path) -> None:
    """Check one published model."""
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
    recipe = json.loads((folder / RECIPE).read_text())
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert recipe["files"] == {name: digest for name, digest in found.items() if name not in (RECIPE, CARD)}
    assert recipe_prompts(folder) is not None
    card = (folder / CARD).read_text()
    assert f"# {folder.name}\n" in card
    loaded = TorchModel(resolve_model(folder), "float32", torch.device("cpu"))
    assert loaded is not None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_model_is_small_whole_and_what_its_recipe_says(folder: Path):
    check_model(folder)
