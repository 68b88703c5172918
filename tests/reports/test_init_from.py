"""A run that begins from a step of another: its base model computes what that step's policy did, and the old run stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from entente.decoding.weight_files import WEIGHTS
from entente.reports.init_from import settings_from_step
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from entente.training.policy import Policy
from storage.adapters import read_adapter
from storage.runs import RunPaths
from tests.command import content


def test_a_run_begins_from_the_weights_of_an_old_step_with_settings_of_its_own(stored_run: RunPaths):
    before, root = content(stored_run.root), stored_run.root.parent
    given: dict[str, Any] = {"run": "hot", "runs_root": root, "training": {"learning_rate": 1e-3}}
    planned = settings_from_step("before:1", "laptop", (), given, make=False)
    assert Path(planned.inference.model).name.startswith("tiny-") and len(list((root / "_models").iterdir())) == 1
    settings = settings_from_step("before:1", "laptop", (), given)
    assert (settings.run, settings.training.learning_rate) == ("hot", 1e-3)
    assert settings.prompts == settings_of(stored_run).prompts
    assert content(stored_run.root) == before

    ids = torch.arange(3, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(settings.inference.model)
    adapted = Policy(Path(planned.inference.model), settings_of(stored_run).training)
    adapted.load_adapter(read_adapter(stored_run, 1).folder)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted.model(ids).logits, atol=1e-4, rtol=0)

    written = (Path(settings.inference.model) / WEIGHTS).stat().st_mtime_ns
    assert settings_from_step("before:1", "laptop", (), given).inference.model == settings.inference.model
    assert (Path(settings.inference.model) / WEIGHTS).stat().st_mtime_ns == written, "it is made once"


@pytest.mark.parametrize(
    ("source", "given", "sentence"),
    [
        ("before", {}, r"takes a run and one of its steps, as mine:20, not 'before'"),
        ("other:1", {}, r"there is no run in '.*other'.*runs there: before"),
        ("before:9", {}, r"run 'before' has no adapter of step 9: it has those of steps 1, 2$"),
        ("before:1", {"inference": {"model": "tiny"}}, r"leave out --inference\.model"),
    ],
)
def test_what_a_run_cannot_begin_from_is_refused(stored_run: RunPaths, source: str, given: dict, sentence: str):
    with pytest.raises(InputError, match=sentence):
        settings_from_step(source, "laptop", (), {"runs_root": stored_run.root.parent, **given})
