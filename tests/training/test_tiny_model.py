"""The model made on the spot: its recipe is made once, and gives the same weights again."""

import shutil
from pathlib import Path

import pytest

from entente.decoding.codec import Codec
from entente.decoding.model_files import max_position
from entente.decoding.thinking import thinking_of
from entente.game.prompts import PromptSettings
from entente.training.imitation.loss import backward
from entente.training.settings import TinyModelSettings, longest_sequence, recipe_hash
from entente.training.tiny_model import make_tiny_model


def test_the_same_recipe_is_made_once_and_repeats(tmp_path: Path):
    recipe = TinyModelSettings(hidden=32, layers=1, source_games=2, imitation_steps=1, imitation_positions=1)
    told: list[str] = []
    folder = make_tiny_model(tmp_path, recipe, lambda stage, done, total: told.append(stage))
    assert told and folder.name == f"tiny-{recipe_hash(recipe)}"
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "others may read the weights as well as the rest"
    weights = (folder / "model.safetensors").read_bytes()
    told.clear()
    assert make_tiny_model(tmp_path, recipe, lambda stage, done, total: told.append(stage)) == folder and not told
    shutil.rmtree(folder)
    make_tiny_model(tmp_path, recipe)
    assert (folder / "model.safetensors").read_bytes() == weights, "the recipe does not repeat"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_each_way_to_prompt_has_a_tiny_model_of_its_own():
    others = {"own_line": "in_place", "legal_orders": "lines", "last_orders": True, "thinking_tokens": 8}
    prompts = [PromptSettings(), *(PromptSettings(examples=count) for count in (1, 2, 6))]
    prompts += [PromptSettings.model_validate({name: value}) for name, value in others.items()]
    assert len({recipe_hash(TinyModelSettings(), each) for each in prompts}) == len(prompts)


def test_a_base_that_thinks_has_seen_thoughts_of_centres_and_the_orders_that_go_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = TinyModelSettings(hidden=32, layers=1, source_games=2, imitation_steps=6, imitation_positions=4)
    budget, seen = 8, []
    prompts = PromptSettings(thinking_tokens=budget)
    monkeypatch.setattr(
        "entente.training.imitation.imitate.backward",
        lambda net, found, weight: (seen.extend(found), backward(net, found, weight))[1],
    )
    folder = make_tiny_model(tmp_path, recipe, prompts=prompts)
    assert folder.name == f"tiny-{recipe_hash(recipe, prompts)}"
    assert max_position(folder) == longest_sequence(PromptSettings()) + budget
    codec = Codec(folder)
    thinking = thinking_of(codec, budget)
    assert thinking is not None and thinking.cue == "THOUGHT:\n"
    named = 0
    for example in seen:
        assert codec.decode(example.ids[: example.prompt].tolist()).endswith(thinking.cue)
        thought, orders = thinking.split(example.ids[example.prompt :].tolist())
        assert len(thought) < budget, "the model could not learn to end its thought"
        words, spelled = codec.decode(thought).split(), codec.decode(orders)
        assert all(f" {word}" in spelled for word in words)
        named += len(words)
    assert named
