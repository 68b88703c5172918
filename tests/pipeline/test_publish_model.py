"""A published model is one small folder: the same policy, its recipe, measured figures, and no folder of this machine."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cli.main import command_line
from decoding.model_files import recipe_prompts, weights_hash
from evaluation.contestants import Contestant, resolve_contestant
from evaluation.intervals import Estimate
from evaluation.match_files import MatchRecord, write_match
from evaluation.match_table import MatchTable, PlayerResult
from evaluation.settings import MatchSettings
from inference.merge import MERGE_LOSS_MAX
from pipeline import publish_model as publishing
from pipeline.improve_rounds import ImproveSettings, begin_round, end_round
from pipeline.publish_model import find_source, publish_model
from records.policy_version import PolicyVersion
from search.settings import SearchSettings
from storage.runs import RunPaths
from telemetry.errors import InputError
from tests.test_models import check_model

IMITATED = {
    "settings": {
        "teachers": ["dumbbot"],
        "recorded": ["/far/away/games.jsonl"],
        "games": 16,
        "steps": 20,
        "positions": 16,
        "seed": 0,
    },
    "parameters": 135_104,
    "curve": [{"step": 20, "tokens": 9, "loss": 4.9, "completion_loss": 4.3, "order_loss": 1.0134, "orders_equal": 0.227}],
}


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A folder of runs that holds the small model under the name 'small'."""
    shutil.copytree(model, tmp_path / "runs" / "_models" / "small")
    return tmp_path / "runs"


def table(*players: str) -> MatchTable:
    """A result in which every figure of a player is 0.125."""
    figure = Estimate(mean=0.125, low=0.1, high=0.15, clusters=14)
    measures = dict.fromkeys(("centres", "gained", "sos", "win", "survival", "solo"), figure)
    results = (PlayerResult(player=name, seats=14, measures=measures, rating=25.0, rating_spread=8.0) for name in players)
    return MatchTable(games=14 * len(players), clusters=14, players=tuple(results), pairs=(), rejected=0)


def stored_match(folder: Path, model: Path, **changes: object) -> Path:
    """A file of a match of the model in `model`, which is called 'its/name' there, and 'mover'."""
    settings = MatchSettings(players=("its/name", "mover"), opponents="mover", years=2, **changes)  # type: ignore[arg-type]
    players = (Contestant(name="its/name", model=model, weights_hash=weights_hash(model)), Contestant(name="mover"))
    write_match(folder, MatchRecord(label="m", settings=settings, players=players, table=table("its/name", "mover"), seconds=1.0))
    return folder / "m.json"


def room_for(share: float, base: Path) -> int:
    """Bytes of a folder that has room for this share of the weights."""
    rest = sum(file.stat().st_size for file in base.glob("tokenizer*.json"))
    return round(share * (base / "model.safetensors").stat().st_size) + rest + publishing.CARD_ROOM


def test_a_model_is_published_byte_for_byte_with_its_hashes(root: Path, tmp_path: Path):
    made = root / "_models" / "small"
    config = json.loads((made / "config.json").read_text()) | {"_name_or_path": str(made)}
    (made / "config.json").write_text(json.dumps(config))
    to = publish_model(find_source("small", root), tmp_path / "models" / "one", root)
    check_model(to)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (to / name).read_bytes() == (made / name).read_bytes()
    assert recipe_prompts(to) == recipe_prompts(made)
    assert [file.name for file in to.iterdir() if str(tmp_path).encode() in file.read_bytes()] == []
    assert "entente evaluate --players models/one,dumbbot" in (to / "README.md").read_text()


def test_a_version_is_its_base_with_the_adapter_that_peft_would_merge(run_of_before: RunPaths, tmp_path: Path):
    root = run_of_before.root.parent
    source = find_source("before", root)
    assert (source.name, source.adapter) == ("before:v2", run_of_before.adapter(2))
    to = publish_model(source, tmp_path / "models" / "two", root)
    check_model(to)
    base = AutoModelForCausalLM.from_pretrained(source.base, dtype=torch.float32)
    oracle = PeftModel.from_pretrained(base, str(source.adapter)).merge_and_unload().state_dict()
    published = load_file(to / "model.safetensors")
    assert all(torch.allclose(oracle[name], weight, atol=1e-6) for name, weight in published.items())
    assert weights_hash(to) != weights_hash(source.base)
    recipe = json.loads((to / "recipe.json").read_text())
    assert recipe["training"]["version"] == 2 and len(recipe["commands"]) == 1
    assert recipe["commands"][0].startswith("entente train --run before --steps 2 ")


def test_the_commands_of_a_recipe_can_be_typed(root: Path, run_of_before: RunPaths, tmp_path: Path):
    made = root / "_models" / "small"
    stored = json.loads((made / "recipe.json").read_text())
    (made / "recipe.json").write_text(json.dumps(stored | IMITATED))
    imitated = publish_model(find_source("small", root), tmp_path / "models" / "one", root)
    trained = publish_model(find_source("before:v1", run_of_before.root.parent), tmp_path / "models" / "two", root)
    for folder in (imitated, trained):
        for command in json.loads((folder / "recipe.json").read_text())["commands"]:
            command_line().parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
    assert "--recorded games.jsonl" in (imitated / "README.md").read_text()
    assert "22.7 % of its orders are the teacher's" in " ".join((imitated / "README.md").read_text().split())


def test_rounds_of_improvement_are_commands_of_the_recipe(run_of_before: RunPaths, tmp_path: Path):
    """The round began with version 1 and ended with version 2."""
    copy = RunPaths(shutil.copytree(run_of_before.root, tmp_path / "runs" / "before"))
    (tmp_path / "runs" / "_models").symlink_to(run_of_before.root.parent / "_models")
    improve = ImproveSettings(positions=7, search=SearchSettings(scripted=("dumbbot", "territorial")))
    begin_round(copy, 1, improve, PolicyVersion(version=1, adapter_hash="x", adapter=None))
    end_round(copy, 1, {"version": 2})
    source = find_source("before:v2", tmp_path / "runs")
    folder = publish_model(source, tmp_path / "models" / "two", tmp_path / "runs")
    first, second = json.loads((folder / "recipe.json").read_text())["commands"]
    assert first.startswith("entente train --run before --steps 1 ")
    assert second == "entente improve --run before --positions 7 --search.scripted dumbbot --search.scripted territorial"
    command_line().parse_args(shlex.split(second)[1:], exit_on_error=False, print_error=False)


def test_the_card_shows_the_figures_of_a_match_under_the_published_name(root: Path, tmp_path: Path):
    source = find_source("small", root)
    file = stored_match(tmp_path / "figures", source.base)
    card = (publish_model(source, tmp_path / "models" / "one", root, [file]) / "README.md").read_text()
    assert "| models/one | 0.12 [0.10, 0.15] | 12.5% [10.0%, 15.0%] |" in card and "its/name" not in card
    assert "entente evaluate --players models/one,mover --opponents mover --games 14 --years 2\n" in card


def test_figures_of_another_model_are_refused(root: Path, run_of_before: RunPaths, tmp_path: Path):
    other = stored_match(tmp_path / "figures", find_source("before", run_of_before.root.parent).base)
    with pytest.raises(InputError, match="'small' is none of the players measured in"):
        publish_model(find_source("small", root), tmp_path / "models" / "one", root, [other])
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_that_exists_or_a_name_of_nothing_is_refused(root: Path, tmp_path: Path):
    with pytest.raises(InputError, match="exists, and a published model never changes"):
        publish_model(find_source("small", root), tmp_path, root)
    with pytest.raises(InputError, match=r"there is no model 'nothing' in .* and no run of that name"):
        find_source("nothing", root)
    (root / "_models" / "small" / "recipe.json").unlink()
    with pytest.raises(InputError, match=r"model 'small' has no recipe\.json with its prompts"):
        find_source("small", root)


def test_a_model_too_large_is_rounded_and_one_that_is_still_too_large_is_refused(root: Path, tmp_path: Path, monkeypatch):
    source = find_source("small", root)
    monkeypatch.setattr(publishing, "MOST_BYTES", room_for(0.75, source.base))
    to = publish_model(source, tmp_path / "models" / "half", root)
    assert {weight.dtype for weight in load_file(to / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((to / "recipe.json").read_text())["weights"] == "bfloat16"
    monkeypatch.setattr(publishing, "MOST_BYTES", room_for(0.25, source.base))
    with pytest.raises(InputError, match=r"MB in bfloat16, more than the .* MB that are left for them: publish a smaller model"):
        publish_model(source, tmp_path / "models" / "none", root)


def test_rounding_that_would_lose_what_was_learned_is_refused(run_of_before: RunPaths, tmp_path: Path, monkeypatch):
    root = run_of_before.root.parent
    source = find_source("before:v1", root)
    assert source.version is not None and source.adapter is not None
    little = shutil.copytree(source.adapter, tmp_path / "little")
    weights = load_file(little / "adapter_model.safetensors")
    save_file({name: weight * 0.01 for name, weight in weights.items()}, little / "adapter_model.safetensors")
    source = replace(source, version=replace(source.version, adapter=little))
    monkeypatch.setattr(publishing, "MOST_BYTES", room_for(0.75, source.base))
    with pytest.raises(InputError, match=f"of what was learned, more than {MERGE_LOSS_MAX:.0%}"):
        publish_model(source, tmp_path / "models" / "lost", root)


def test_a_file_that_names_a_folder_of_this_machine_is_refused(root: Path, tmp_path: Path):
    recipe = root / "_models" / "small" / "recipe.json"
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"seen": str(tmp_path / "models")}))
    with pytest.raises(InputError, match=r"'recipe.json' would name this machine's folder"):
        publish_model(find_source("small", root), tmp_path / "models" / "one", root)


def test_a_published_model_is_a_player_whose_weights_are_part_of_its_identity(root: Path):
    folder = root / "_models" / "small"
    player = resolve_contestant(f"{folder}+search", "", root)
    assert player.is_policy and player.searches and not player.run
    assert player == replace(player, model=folder.resolve(), weights_hash=weights_hash(folder))
