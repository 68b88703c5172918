"""The model made on the spot: its shared heads change nothing, its recipe is made once, and a cut attempt is made again."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding.codec import Codec
from decoding.model_files import max_position
from decoding.thinking import thinking_of
from game.prompt_settings import PromptSettings
from training.recipe import longest_sequence, recipe_hash
from training.settings import TinyModelSettings
from training.tiny_model import SharedRow, language_loss, make_tiny_model


def test_computing_a_head_once_gives_the_loss_and_gradient_of_separate_prompts(model: Path):
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tails = [([7, 8, 9], [11, 12]), ([7, 3], [14, 15, 16]), ([4], [5])]
    rows = [SharedRow(head=[20, 21, 22, 23], tails=tails), SharedRow(head=[30, 31], tails=tails[:1])]
    net.zero_grad()
    shared = language_loss(net, rows)
    shared.backward()
    gradient = net.model.layers[0].self_attn.q_proj.weight.grad.clone()

    net.zero_grad()
    total, count = torch.zeros(()), 0
    for row in rows:
        heads = net(input_ids=torch.tensor([row.head])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(heads, torch.tensor(row.head[1:]), reduction="sum")
        count += len(row.head) - 1
        for rest, completion in row.tails:
            tail = rest + completion
            logits = net(input_ids=torch.tensor([row.head + tail])).logits[0, len(row.head) - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(tail), reduction="sum")
            count += len(tail)
    (total / count).backward()
    assert shared.item() == pytest.approx((total / count).item(), abs=1e-5)
    assert torch.allclose(gradient, net.model.layers[0].self_attn.q_proj.weight.grad, atol=1e-6)


def test_imitation_lowers_the_loss(model: Path):
    losses = json.loads((model / "recipe.json").read_text())["loss"]
    assert losses[-1] < losses[0] - 1


def test_the_same_recipe_is_made_once_and_a_cut_attempt_again(tmp_path: Path):
    recipe = TinyModelSettings(hidden=32, layers=1, source_games=1, imitation_steps=1, imitation_positions=1)
    told: list[str] = []
    folder = make_tiny_model(tmp_path, recipe, lambda stage, done, total: told.append(stage))
    assert told and folder.name == f"tiny-{recipe_hash(recipe)}"
    weights = (folder / "model.safetensors").read_bytes()
    told.clear()
    assert make_tiny_model(tmp_path, recipe, lambda stage, done, total: told.append(stage)) == folder and not told
    (folder / "recipe.json").unlink()
    make_tiny_model(tmp_path, recipe)
    assert (folder / "model.safetensors").read_bytes() == weights, "the recipe does not repeat"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_base_that_thinks_has_seen_thoughts_of_centres_and_the_orders_that_go_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = TinyModelSettings(hidden=32, layers=1, source_games=2, imitation_steps=6, imitation_positions=8)
    budget, seen = 8, []
    prompts = PromptSettings(thinking_tokens=budget)
    plain = language_loss
    monkeypatch.setattr("training.tiny_model.language_loss", lambda net, rows: (seen.extend(rows), plain(net, rows))[1])
    folder = make_tiny_model(tmp_path, recipe, prompts=prompts)
    assert folder.name == f"tiny-{recipe_hash(recipe, prompts)}"
    assert max_position(folder) == longest_sequence(PromptSettings()) + budget
    codec = Codec(folder)
    thinking = thinking_of(codec, budget)
    assert thinking is not None and thinking.cue == "THOUGHT:\n"
    named = 0
    for rest, completion in (tail for row in seen for tail in row.tails):
        assert codec.decode(rest).endswith(thinking.cue)
        thought, orders = thinking.split(completion)
        assert len(thought) < budget, "the model could not learn to end its thought"
        words, spelled = codec.decode(thought).split(), codec.decode(orders)
        assert all(f" {word}" in spelled for word in words)
        named += len(words)
    assert named
