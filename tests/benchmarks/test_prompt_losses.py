"""Forms of prompts are compared on the same held-out decisions after about the same CPU time."""

import math
from pathlib import Path

import pytest

from benchmarks.prompt_losses import ARMS, prompt_losses
from training.imitation.settings import ImitationSettings


@pytest.mark.system
def test_every_form_is_trained_for_its_time_and_measured(tmp_path: Path):
    settings = ImitationSettings(games=2, last_year=1902, teachers=("mover",), hidden=32, layers=1, positions=1)
    figures = prompt_losses(tmp_path, settings, 1.0)
    for name in ARMS:
        assert 0 < figures[f"{name}_order_loss_nats"] < math.log(100) and 0 < figures[f"{name}_orders_equal_share"] < 1
        assert figures[f"{name}_imitation_steps"] >= 1 and figures[f"{name}_imitation_cpu_s"] > 0
    # What a form adds is in its held-out prompts.
    tokens = [figures[f"{name}_held_out_prompt_tokens"] for name in ("neighbours", "threats", "factored")]
    assert min(tokens) > figures["in_place_held_out_prompt_tokens"]
