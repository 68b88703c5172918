"""The trainer's processes see their own cards, and leave an engine on the same card its room."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from entente.training.policy import leave_room
from entente.training.process import TrainerProcess
from entente.training.settings import CARD_SHARE, TrainingSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings
from tests.telemetry.fake_nvml import card


@pytest.mark.parametrize(
    ("given", "visible", "share"),
    [
        pytest.param({}, "all", None, id="CPU"),
        pytest.param({"cards": [card(1)]}, "GPU-1", None, id="own card"),
        pytest.param({"cards": [card(2), card(0)], "card_share": 0.4}, "GPU-2,GPU-0", "0.4000", id="shared, two processes"),
    ],
)
def test_the_child_begins_with_its_cards_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], visible: str, share: str | None
):
    """CUDA reads it when it is initialised, so it must be there before torch is imported."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    real, seen = subprocess.Popen, {}

    def start(*words: Any, env: dict[str, str], **how: Any) -> Any:
        seen.update(env)
        return real(["cat"], stdin=how["stdin"], stdout=subprocess.DEVNULL)

    monkeypatch.setattr(subprocess, "Popen", start)
    paths = RunPaths(tmp_path / "run").create()
    TrainerProcess(paths, tmp_path, TrainingSettings(), StorageSettings(), 1, **given).close()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen.get(CARD_SHARE)) == (visible, share)
    assert seen["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_torch_keeps_no_more_of_a_shared_card_than_its_share(monkeypatch: pytest.MonkeyPatch):
    """Only on a card can this be seen to bound anything; here it is seen that torch is told."""
    bounds: list[tuple[float, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    leave_room(torch.device("cuda", 1))
    monkeypatch.setenv(CARD_SHARE, "0.4")
    leave_room(torch.device("cpu"))
    leave_room(torch.device("cuda", 1))
    leave_room(torch.device("cuda"))
    assert bounds == [(0.4, 1), (0.4, None)]
