"""Folders that leave this machine: others load them as they are, they name nothing of it, and play as the run did."""

import asyncio
import getpass
import hashlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from entente.decoding.base_identity import weights_hash
from entente.decoding.codec import Codec
from entente.decoding.model_files import read_config, recipe_prompts
from entente.evaluation.adapter_folders import adapter_prompts, check_weights, open_adapter
from entente.evaluation.contestants import Contestant, resolve_contestant
from entente.evaluation.intervals import Estimate
from entente.evaluation.match_files import MatchRecord, write_match
from entente.evaluation.match_table import MEASURES, MatchTable, PlayerResult
from entente.evaluation.protocols import protocol_match
from entente.evaluation.settings import MatchSettings
from entente.game.board import Board
from entente.game.prompts import board_text, power_text
from entente.game.snapshot import Snapshot
from entente.inference.legal_orders import LegalPlayer
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.players.policy import DecisionRequest, PolicyPlayer, Sampled, Tokens
from entente.reports import publish as publishing
from entente.reports.publish import export_adapter, find_model, find_version, publish_model
from entente.reports.published_figures import match_figures
from entente.settings.layers import changed_settings, layered_settings
from entente.telemetry.errors import DataError, InputError
from entente.training.fetch_model import WHEELS, name_to_fetch
from entente.training.imitation.settings import ImitationSettings
from storage.runs import RunPaths
from tests.chat_models import set_config
from tests.damage import flip
from tests.test_models import check_model

IDS = torch.arange(1, 40)[None]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def root(stored_run: RunPaths) -> Path:
    return stored_run.root.parent


@pytest.fixture
def exported(root: Path, tmp_path: Path) -> Path:
    """The newest version of the stored run."""
    return export_adapter(find_version("before:newest", root), tmp_path / "away" / "mine", root)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def of_the_run(root: Path) -> torch.Tensor:
    """Logits of version 2 of the stored run, by peft."""
    source = find_version("before:v2", root)
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source.base), str(source.adapter)))


def test_an_export_is_whole_and_names_no_folder_and_nobody_of_this_machine(exported: Path, root: Path, tmp_path: Path):
    recipe = json.loads((exported / "recipe.json").read_text())
    files = {file.relative_to(exported).as_posix(): file for file in exported.rglob("*") if file.is_file()}
    found = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    assert recipe["files"] == {name: digest for name, digest in found.items() if name not in ("recipe.json", "README.md")}
    assert files.keys() >= {"adapter_model.safetensors", "adapter_config.json", "legal_orders.py"}
    assert files.keys() >= {"base/config.json", "base/tokenizer.json"} and "tokenizer.json" not in files
    assert json.loads(files["adapter_config.json"].read_text())["base_model_name_or_path"] == "base"
    local = {str(place) for place in (tmp_path, root, Path.cwd(), Path.home())}
    texts = {name: file.read_text() for name, file in files.items() if file.suffix != ".safetensors"}
    assert len(texts) > 4 and [name for name, text in texts.items() if any(place in text for place in local)] == []
    assert [name for name, text in texts.items() if re.search(rf"\b{re.escape(getpass.getuser())}\b", text)] == []


def test_peft_loads_the_folder_as_it_is_and_computes_what_the_run_did(exported: Path, root: Path, monkeypatch):
    monkeypatch.chdir(exported)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(".")), of_the_run(root))


def sampled(player: Contestant, base: Path, tokens: Tokens, position: Snapshot) -> list[Sampled]:
    """What the player draws for three powers of the position, by the torch engine."""

    async def play() -> list[Sampled]:
        engine = TorchEngine(base, InferenceSettings(model=str(base), engine="torch", max_model_length=1024))
        await engine.start()
        await engine.publish(replace(player.policy, version=1))
        board, found = Board.restore(position), []
        for power, legal in list(board.legal_orders().items())[:3]:
            request = DecisionRequest(
                game="g", rng_name="d", phase_index=0, power=power, legal=legal, board=board, snapshot_id="s"
            )
            found.append(await PolicyPlayer(engine, tokens, 1).decide(request))
        await engine.close()
        return found

    return asyncio.run(play())


def test_an_exported_adapter_orders_what_its_run_s_version_orders(exported: Path, root: Path, positions: list[Snapshot]):
    source, player = find_version("before:v2", root), resolve_contestant(str(exported), "", root)
    assert player.is_policy and player.model and player.adapter
    assert source.version is not None and source.settings is not None
    check_weights(player.policy, player.model)
    own = Tokens(Codec(source.base), source.settings.prompts)
    prompts = adapter_prompts(player.adapter, player.model)
    assert prompts is not None
    tokens = Tokens(Codec(player.model), prompts)
    for position in positions[:2]:
        pairs = zip(
            sampled(player, player.model, tokens, position), sampled(source.version, source.base, own, position), strict=True
        )
        for away, home in pairs:
            assert away.orders == home.orders and away.prompt_ids == home.prompt_ids
            np.testing.assert_allclose(away.generation.logprobs, home.generation.logprobs, atol=1e-6)


def test_the_program_in_the_folder_draws_legal_orders_with_their_probability_under_the_mask(exported: Path):
    assert (exported / "legal_orders.py").read_bytes() == Path("entente/inference/legal_orders.py").read_bytes()
    player, board = LegalPlayer(exported), Board.start()
    legal = board.legal_orders()["TURKEY"]
    orders, logprob = player.sample(board, "TURKEY", np.random.default_rng(3))
    assert legal.admits(orders)
    completion, table = player.tables.spell(orders, legal), player.tables.table(legal)
    prompt = player.form.ids(board_text(board, "TURKEY", player.prompts), power_text(legal, board, player.prompts, cue=""))
    with torch.inference_mode():
        all_logits = player.model(torch.tensor([prompt + completion])).logits[0].double()
    ids, bounds = table.legal_sets(completion)
    expected = 0.0
    for place, token in enumerate(completion):
        row, allowed = all_logits[len(prompt) + place - 1], ids[bounds[place] : bounds[place + 1]]
        expected += float(row[token] - torch.logsumexp(row[torch.tensor(allowed)], 0))
    assert logprob == pytest.approx(expected, abs=1e-4)


def test_an_adapter_of_a_fetched_base_names_it_and_plays_once_it_is_fetched(root: Path, tmp_path: Path, monkeypatch):
    source = find_version("before:v2", root)
    monkeypatch.setattr(publishing, "name_to_fetch", lambda base: "small")
    away = export_adapter(source, tmp_path / "away" / "mine", root)
    assert not (away / "base").exists() and "`entente model fetch small` brings" in (away / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="needs its base model 'runs/_models/small', which is not here"):
        open_adapter(away, root)
    fetched = shutil.copytree(source.base, tmp_path / "runs" / "_models" / "small")
    assert open_adapter(away, root).base.resolve() == fetched


def change_json(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, name, **fields)


def outside(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    """The change to an adapter whose recipe says prompts alone, as one from outside."""

    def both(folder: Path) -> None:
        prompts = json.loads((folder / "recipe.json").read_text())["prompts"]
        (folder / "recipe.json").write_text(json.dumps({"prompts": prompts}))
        change(folder)

    return both


def without_prompts(folder: Path) -> None:
    """Neither the adapter nor the base in its run's folder says how prompts look."""
    base = open_adapter(folder, folder.parent.parent / "stored").base
    for recipe in (folder / "recipe.json", base / "recipe.json"):
        recipe.unlink()


REFUSED = {
    "a damaged adapter": (lambda folder: flip(folder / WEIGHTS), DataError, "is not the file that was exported"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), DataError, "lacks the file"),
    "another base": (
        change_json("recipe.json", files={}, base={"identity": "0" * 16}),
        InputError,
        "trained on another base model",
    ),
    "no prompts": (without_prompts, InputError, r"has no recipe.json with prompt settings"),
    "a revision of its base": (
        outside(change_json("adapter_config.json", base_model_name_or_path="some/one", revision="v1")),
        InputError,
        "trained on the revision 'v1' of 'some/one'",
    ),
    "a rank too large": (outside(change_json("adapter_config.json", r=1024)), DataError, "has rank 1024 but .* take rank 512"),
}


@pytest.mark.parametrize(("spoil", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_cannot_play_is_refused_in_a_sentence(exported: Path, root: Path, spoil, kind, said):
    spoil(exported)
    with pytest.raises(kind, match=said) as refused:
        player = resolve_contestant(str(exported), "", root)
        assert player.model is not None
        check_weights(player.policy, player.model)
    assert "\n" not in str(refused.value)


def test_what_cannot_be_exported_is_refused_before_a_folder_is_made(root: Path, tmp_path: Path, monkeypatch):
    with pytest.raises(InputError, match="'before:v0' is a base model and has no adapter"):
        export_adapter(find_version("before:v0", root), tmp_path / "base", root)
    with pytest.raises(InputError, match="has no policy version 9"):
        find_version("before:v9", root)
    source = find_version("before:v2", root)
    with pytest.raises(InputError, match="exists, and a published model never changes"):
        export_adapter(source, tmp_path, root)
    monkeypatch.setattr(publishing, "MOST_BASE_BYTES", 1000)
    with pytest.raises(InputError, match=r"more than the 0 MB that can be included: export with --merged"):
        export_adapter(source, tmp_path / "away" / "mine", root)
    assert list((tmp_path / "away").iterdir()) == []


IMITATED: dict[str, Any] = {
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


def test_a_link_out_of_a_model_s_folder_is_not_published(tmp_path: Path):
    base, to = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "to"
    for folder in (base, base.parent.parent / "blobs", to):
        folder.mkdir(parents=True)
    (base.parent.parent / "blobs" / "0a").write_text("{}")
    (base / "special_tokens_map.json").symlink_to("../../blobs/0a")
    publishing._copy_tokenizer(base, to)
    assert (to / "special_tokens_map.json").read_text() == "{}", "as in the hub's cache"
    (tmp_path / "key.json").write_text('{"key": "secret"}')
    (base / "tokenizer_config.json").symlink_to(tmp_path / "key.json")
    with pytest.raises(InputError, match=r"tokenizer_config.json' is a link to a file elsewhere"):
        publishing._copy_tokenizer(base, to)
    assert not (to / "tokenizer_config.json").exists()
    (base / "recipe.json").symlink_to(tmp_path / "key.json")
    with pytest.raises(InputError, match=r"recipe.json' is a link to a file elsewhere"):
        publishing._base_recipe(base)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100_000.0}, LLAMA3], ids=["default", "llama3"])
def test_whole_weights_tell_the_rotary_base_to_transformers_4_too(tmp_path: Path, rope: dict[str, Any]):
    base, to = tmp_path / "base", tmp_path / "to"
    to.mkdir()
    LlamaConfig(max_position_embeddings=512, rope_parameters=dict(rope)).save_pretrained(base)
    publishing._write_config(base, to, publishing._rope_before_5(read_config(base)) | {"dtype": "float32"})
    written = read_config(to)
    read_by_4 = {"rope_type": "default", "rope_theta": written.get("rope_theta", 10_000.0)} | (written.get("rope_scaling") or {})
    assert read_by_4 == rope
    assert LlamaConfig.from_pretrained(to).rope_parameters == rope == LlamaConfig.from_pretrained(base).rope_parameters


@pytest.fixture
def models(tmp_path: Path, model: Path) -> Path:
    """A folder of runs that holds the small model under the name 'small'."""
    shutil.copytree(model, tmp_path / "runs" / "_models" / "small")
    return tmp_path / "runs"


def test_commands_of_a_card_can_be_typed_for_a_folder_with_a_space(tmp_path: Path):
    base = {"name": "base", "from_hub": False, "fetched": "", "identity": ""}
    lora = {"r": 1, "lora_alpha": 1, "target_modules": []}
    training = {"run": "one", "version": 1, "preset": "laptop", "settings": {}}
    recipe = {"parameters": 1, "weights": "", "base": base, "adapter_hash": "", "lora": lora, "training": training, "prompts": {}}
    words = set()
    for card in ("adapter", "model"):
        about = dict.fromkeys(("merged", "has_curve"), False) | {"rank": 1}
        figures: dict[str, Any] = dict.fromkeys(("matches", "scores", "base_scores"), ())
        publishing._finish(tmp_path, "my own", {"settings": {}, **recipe}, f"{card}_card.md.jinja", figures, **about)
        blocks = re.findall(r"```sh\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
        words |= {word for block in blocks for word in shlex.split(block) if "own" in word}
    assert words == {"./my own,dumbbot", "./my own", "my own=.", "my own,dumbbot", "my own+search,dumbbot", "my own"}


def test_a_name_of_a_model_and_of_a_run_is_refused(tmp_path: Path):
    for file in (tmp_path / "_models" / "one" / "recipe.json", tmp_path / "one" / "settings.json"):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    with pytest.raises(InputError, match=r"'one' is a model and a run: give '.*_models/one' .* or 'one:newest' for the run"):
        find_model("one", tmp_path)


def room_for(share: float, base: Path) -> int:
    """Bytes of a folder that has room for this share of the weights."""
    rest = sum(file.stat().st_size for file in base.glob("tokenizer*.json"))
    return round(share * (base / "model.safetensors").stat().st_size) + rest + publishing._CARD_BYTES


def test_a_model_is_published_byte_for_byte_with_its_hashes(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = models / "_models" / "small"
    config = json.loads((made / "config.json").read_text()) | {"_name_or_path": str(made)}
    (made / "config.json").write_text(json.dumps(config))
    to = publish_model(find_model("small", models), tmp_path / "models" / "one", models)
    check_model(to)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (to / name).read_bytes() == (made / name).read_bytes()
    assert recipe_prompts(to) == recipe_prompts(made)
    files = list(to.iterdir())
    assert len(files) > 4 and [file.name for file in files if str(tmp_path).encode() in file.read_bytes()] == []
    assert "entente evaluate --players models/one,dumbbot" in (to / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    to = publish_model(find_model("small", models), Path("one"), models)
    assert "entente evaluate --players ./one,dumbbot" in (to / "README.md").read_text()  # a player with a slash is a folder


def test_a_version_computes_what_the_run_did(stored_run: RunPaths, tmp_path: Path):
    root = stored_run.root.parent
    source = find_model("before", root)
    assert (source.name, source.adapter) == ("before:v2", stored_run.adapter(2))
    to = publish_model(source, tmp_path / "models" / "two", root)
    check_model(to)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(to)), of_the_run(root), atol=1e-4, rtol=0)
    assert weights_hash(to) != weights_hash(source.base)
    assert json.loads((to / "recipe.json").read_text())["training"]["version"] == 2
    config = read_config(to)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "transformers 4 reads the former alone"


def test_a_version_of_a_version_has_a_card_with_every_run_that_trained_it(stored_run: RunPaths, tmp_path: Path):
    root, made = stored_run.root.parent, stored_run.root.parent / "_models"
    base = find_version("before:v2", root).base
    for number, version in enumerate((2, 1, 2), 1):
        source = find_version(f"before:v{version}", root)
        assert source.settings is not None
        inference = source.settings.inference.model_copy(update={"model": str(base)})
        source = replace(source, base=base, settings=source.settings.model_copy(update={"inference": inference}))
        base = publish_model(source, made / f"of-{number}", root)
    third = base
    recipe = json.loads((third / "recipe.json").read_text())
    assert [each["version"] for each in (*recipe["earlier"], recipe["training"])] == [2, 1, 2]
    assert recipe["training"]["settings"]["inference.model"] == "runs/_models/of-2"
    copied = publish_model(find_model("of-3", root), tmp_path / "copied", root)
    assert json.loads((copied / "recipe.json").read_text())["earlier"] == recipe["earlier"]
    card = (third / "README.md").read_text()
    assert [line for line in card.splitlines() if line.startswith("`entente train --config")] == [
        "`entente train --config trained-1.toml --run before --steps 2` trains it:",
        "`entente train --config trained-2.toml --run before --steps 1` trains it on:",
        "`entente train --config trained.toml --steps 2` trains it on, where `trained.toml` holds what differs from",
    ]


def test_a_version_of_a_fetched_base_has_a_card_that_says_nothing_of_how_the_base_was_taught(
    stored_run: RunPaths, tmp_path: Path
):
    source = find_version("before:v2", stored_run.root.parent)
    base = shutil.copytree(source.base, tmp_path / "fetched")
    made = json.loads((base / "recipe.json").read_text())
    (base / "recipe.json").write_text(json.dumps({"wheel": WHEELS["smollm2"].release, "licence": "Apache-2.0"}))
    to = publish_model(replace(source, base=base), tmp_path / "models" / "two", stored_run.root.parent)
    recipe = json.loads((to / "recipe.json").read_text())
    assert (recipe["wheel"], recipe["parameters"]) == (WHEELS["smollm2"].release, made["parameters"])
    assert (name_to_fetch(base), name_to_fetch(to)) == ("smollm2", ""), "an adapter on the version comes with its base"
    card = (to / "README.md").read_text()
    assert "games between" not in card and "imitation steps" not in card and "stored as float32" in card


@pytest.mark.parametrize(
    ("measured", "opponents", "run"),
    [("v2", "random", "before"), ("random", "v2", "before"), ("v2", "random", "original")],
    ids=["one seat", "six seats", "of a copied run"],
)
def test_the_matches_of_a_version_s_run_are_on_its_card(
    stored_run: RunPaths, tmp_path: Path, measured: str, opponents: str, run: str
):
    root = stored_run.root.parent
    source = find_version("before:v2", root)
    half = Estimate(mean=0.5, low=None, high=None)
    figures = PlayerResult(player=measured, seats=7, measures=dict.fromkeys(MEASURES, half), years=half, by_year=(half,))
    assert source.version is not None
    record = MatchRecord(
        label="one",
        settings=MatchSettings(players=(measured,), opponents=opponents, years=1),
        players=(
            Contestant(name="v2", run=run, version=2, adapter_hash=source.version.adapter_hash),
            Contestant(name="random"),
        ),
        table=MatchTable(games=7, clusters=7, players=(figures,), pairs=(), rejected=0),
    )
    write_match(stored_run.matches, record)
    again = [stored_run.matches / "one.json"]  # as `--results runs/before/scores/matches/*.json` names it
    card = (publish_model(source, tmp_path / "models" / "two", root, again) / "README.md").read_text()
    named = {"v2": "models/two"}
    assert card.count(f"| {named.get(measured, measured)} | 0.50") == 1
    assert f"against six of {named.get(opponents, opponents)}" in " ".join(card.split())


def test_a_card_says_that_a_match_is_a_part_of_its_protocol():
    settings = MatchSettings(**protocol_match("gunboat-1910", ("v2",), "", {"games": 7}))
    table = MatchTable(games=7, clusters=7, players=(), pairs=(), rejected=0)
    for games, said in ((7, "; this is a part of protocol gunboat-1910: 7 of its 210 games"), (210, "protocol gunboat-1910")):
        record = MatchRecord(label="one", settings=settings.model_copy(update={"games": games}), players=(), table=table)
        assert match_figures(record, "v2", "models/two")["how"].endswith(said)


def test_a_match_of_another_base_whose_run_had_this_name_is_not_on_the_card(stored_run: RunPaths, tmp_path: Path):
    source = find_version("before:v0", stored_run.root.parent)
    assert source.version is not None
    former = replace(source.version, weights_hash="of a base that the name had before")
    settings = MatchSettings(players=("before:v0",), opponents="random")
    table = MatchTable(games=7, clusters=7, players=(), pairs=(), rejected=0)
    write_match(tmp_path, MatchRecord(label="one", settings=settings, players=(former,), table=table))
    with pytest.raises(InputError, match="did not play in the match"):
        publish_model(source, tmp_path / "models" / "base", stored_run.root.parent, [tmp_path / "one.json"])


def test_the_settings_of_a_card_make_the_policy_again(models: Path, stored_run: RunPaths, tmp_path: Path):
    made = models / "_models" / "small"
    stored = json.loads((made / "recipe.json").read_text())
    (made / "recipe.json").write_text(json.dumps(stored | IMITATED))
    card = (publish_model(find_model("small", models), tmp_path / "models" / "one", models) / "README.md").read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", card, re.DOTALL)
    assert ImitationSettings.model_validate(tomllib.loads(settings)).recorded == (Path("games.jsonl"),)
    assert "22.7 % of its orders are the teacher's" in " ".join(card.split())
    source = find_version("before:v1", stored_run.root.parent)
    assert source.settings is not None
    blend = {"reward_weights": {"centres_gained": 1.0, "final_centres_gained": 0.5}}  # the preset has the first too
    storage = source.settings.storage.model_copy(update=blend)
    rollouts = source.settings.rollouts.model_copy(update={"horizon_schedule": "1:2,9:3"})  # its version 1 knew no three years
    pipeline = source.settings.pipeline.model_copy(update={"buffer_depth": 0})
    changes = {"storage": storage, "rollouts": rollouts, "pipeline": pipeline}
    source = replace(source, settings=source.settings.model_copy(update=changes))
    card = (export_adapter(source, tmp_path / "two", stored_run.root.parent) / "README.md").read_text()
    (tmp_path / "trained.toml").write_text(*re.findall(r"```toml\n(.*?)```", card, re.DOTALL))
    assert source.settings is not None
    few = {"evaluation": source.settings.evaluation.model_dump()}  # which changes neither rows nor weights
    schedule = {"rollouts.horizon_schedule": ["1:2,9:3", "1:2"]}
    again = layered_settings("laptop", [tmp_path / "trained.toml"], few)
    assert changed_settings(source.settings, again) == schedule and again.pipeline.buffer_depth == 0


TAUGHT = {"labels": ["/far/away/round-1"], "games": 0, "recorded": [], "begin_with": "/far/away/models/one"}
SOURCES = {
    "recorded": ({}, "recorded games; no other model was used.", "games.jsonl", "all that can be read"),
    "played": ({"recorded": []}, "games between computer players; no other model was used.", "dumbbot", "16"),
    "games and labels": (
        TAUGHT | {"games": 16},
        "games between computer players and labels of a search.",
        "dumbbot",
        "16",
    ),
    "labels alone": (TAUGHT, "labels of a search.", "", ""),
}


@pytest.mark.parametrize(("settings", "sources", "imitates", "games"), SOURCES.values(), ids=SOURCES)
def test_a_card_says_what_was_imitated_and_no_folder(
    models: Path, tmp_path: Path, settings: dict[str, Any], sources: str, imitates: str, games: str
):
    made = models / "_models" / "small"
    stored = json.loads((made / "recipe.json").read_text())
    recipe = stored | IMITATED | {"settings": {**IMITATED["settings"], **settings}, "begun_with": IMITATED}
    (made / "recipe.json").write_text(json.dumps(recipe))
    to = publish_model(find_model("small", models), tmp_path / "models" / "one", models)
    card = (to / "README.md").read_text()
    assert f"It was made from\n{sources}\n" in card and "/far/away" not in card + (to / "recipe.json").read_text()
    rows = dict(re.findall(r"^\| (imitates|games) \| ([^|]*?)(?:, one in 20 of them held out)? \|$", card, re.MULTILINE))
    assert (rows.get("imitates", ""), rows.get("games", "")) == (imitates, games)


def test_a_model_too_large_is_rounded_and_one_that_is_still_too_large_is_refused(models: Path, tmp_path: Path):
    source = find_model("small", models)
    to = publish_model(source, tmp_path / "models" / "half", models, most_bytes=room_for(0.75, source.base))
    assert {weight.dtype for weight in load_file(to / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((to / "recipe.json").read_text())["weights"] == "bfloat16"
    with pytest.raises(InputError, match=r"MB in bfloat16, more than the .* MB that are left for them: publish a smaller model"):
        publish_model(source, tmp_path / "models" / "none", models, most_bytes=room_for(0.25, source.base))


def test_a_long_recipe_counts_for_the_size_of_the_folder(models: Path, tmp_path: Path):
    source = find_model("small", models)
    recipe, most = source.base / "recipe.json", room_for(1, source.base)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"loss": [0.125] * 4000}))
    to = publish_model(source, tmp_path / "models" / "one", models, most_bytes=most)
    assert sum(file.stat().st_size for file in to.iterdir()) <= most


@pytest.mark.parametrize("folder", ["models", "modèles"])
def test_a_file_that_names_a_folder_of_this_machine_is_refused(models: Path, tmp_path: Path, folder: str):
    recipe = models / "_models" / "small" / "recipe.json"
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"seen": str(tmp_path / folder)}))
    with pytest.raises(InputError, match=r"'recipe.json' contains the local path"):
        publish_model(find_model("small", models), tmp_path / folder / "one", models)
