"""Every example of docs/extending.md runs as it stands there; a part that cannot be used is refused in one sentence."""

import asyncio
import json
import math
import random
import re
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from entente.cli.settings import _toml
from entente.evaluation.contestants import Contestant, resolve_contestant
from entente.evaluation.match_files import match_label
from entente.evaluation.settings import MatchSettings
from entente.game.board import Board
from entente.game.scripted import player
from entente.players.policy import DecisionRequest
from entente.players.search import SearchDecider
from entente.players.search_settings import SearchSettings
from entente.rollouts.label_games import LabelSettings, made_by
from entente.settings.layers import changed_settings, layered_settings, settings_of
from entente.telemetry.errors import InputError
from entente.telemetry.process_pool import ProcessPool
from entente.training.imitation import teacher_games
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.teacher_games import GAMES_A_SHARD, _scripted_folder, make_games
from storage.arrow_files import COMPONENTS
from storage.control import bot_sources, program_differences, program_marks, source_hash
from storage.rewards import returns_of, reward_of
from storage.runs import RunPaths
from tests.command import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = dict(re.findall(r"^```(?:python|toml|jinja|json) (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
"""File that an example belongs to -> the example."""
BOT, PLAIN, CAREFUL = "my_entente.bots:stayer", "my_entente.losses:plain_ratio", "my_entente.rewards:careful"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Path]:
    """Make modules that can be imported in this test: `package({"mine.py": "..."})`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_entente", "broken", "odd")]:
        monkeypatch.delitem(sys.modules, name)
    for remembers in (player, reward_of, source_hash):
        remembers.cache_clear()

    def write(files: dict[str, str]) -> Path:
        site = tmp_path / "site"
        for name, text in files.items():
            (site / name).parent.mkdir(exist_ok=True, parents=True)
            (site / name).write_text(text)
        monkeypatch.syspath_prepend(str(site))
        return site

    return write


@pytest.fixture
def documented(package: Callable[[dict[str, str]], Path]) -> Path:
    """The package of the page, where Python finds it."""
    return package({name: text for name, text in BLOCKS.items() if name.startswith("my_entente/")})


def test_every_example_has_the_file_that_it_belongs_to():
    assert len(re.findall(r"^```(?:python|toml|jinja|json)", PAGE, re.MULTILINE)) == len(BLOCKS) == 8


def test_the_settings_of_the_page_are_accepted_with_its_package_and_refused_without(
    package: Callable[[dict[str, str]], Path], tmp_path: Path
):
    file = tmp_path / "mine.toml"
    file.write_text(BLOCKS["mine.toml"])
    with pytest.raises(InputError, match=f"the scripted player '{BOT}' cannot be loaded .ModuleNotFoundError"):
        layered_settings("laptop", [file])
    package({name: text for name, text in BLOCKS.items() if name.startswith("my_entente/")})
    settings = layered_settings("laptop", [file])
    assert (settings.training.loss, settings.storage.reward_weights) == (PLAIN, {CAREFUL: 1.0})
    file.write_text(_toml(settings.model_dump(mode="json")))
    assert layered_settings("laptop", [file]) == settings, "what `entente settings` prints can be given back"
    changed = {name: after for name, (_, after) in changed_settings(layered_settings("laptop"), settings).items()}
    card = "".join(f"{name} = {json.dumps(value)}\n" for name, value in changed.items() if value is not None)
    assert tomllib.loads(card)["storage"]["reward_weights"] == {CAREFUL: 1.0}, "and so can a model card's settings"


@pytest.mark.parametrize(
    "settings",
    [{"rollouts": {"opponents": "stayer"}}, {"training": {"loss": "plain"}}, {"storage": {"reward_weights": {"x:1": 1.0}}}],
)
def test_a_name_that_is_neither_ours_nor_a_path_is_refused(settings: dict[str, Any]):
    with pytest.raises(InputError, match=r"There is no .* Known: .*; one of your own is named 'module:attribute'"):
        layered_settings("laptop", (), settings)


def test_the_bot_of_the_page_plays(documented: Path):
    board = Board.start()
    for power, legal in board.legal_orders().items():
        assert player(BOT)(legal, random.Random(0), board) == [f"{unit} H" for unit in board.units()[power]]
    assert resolve_contestant(BOT, "no run", documented).name == BOT


SEARCHING = MatchSettings(players=("hold+search",), search=SearchSettings(player=(BOT,)))
PLAYED: dict[str, Callable[[], object]] = {
    "match": lambda: match_label(MatchSettings(), [Contestant(name=BOT)]),
    "search of a match": lambda: match_label(SEARCHING, [Contestant(name="hold+search", searches=True)]),
    "teacher games": lambda: _scripted_folder(Path(), ImitationSettings(teachers=(f"{BOT}+search",)), None),
    "opponents of labels": lambda: made_by(LabelSettings(opponents=f"v0,{BOT}*2"), {}),
    "search of labels": lambda: made_by(LabelSettings(search=SearchSettings(scripted=(BOT,))), {}),
    "rollouts": lambda: program_marks([BOT]),
}


@pytest.mark.parametrize("identity", PLAYED.values(), ids=PLAYED)
def test_what_was_played_by_a_bot_is_not_that_of_the_edited_bot(documented: Path, identity: Callable[[], object]):
    before = identity()
    with (documented / "my_entente" / "bots.py").open("a") as file:
        file.write("# edited")
    assert identity() == before, "the process plays the bot that it has loaded"
    source_hash.cache_clear()
    assert identity() != before


def test_a_worker_with_another_bot_than_the_training_process_is_refused(documented: Path):
    marks = program_marks([BOT])
    assert program_differences(marks, [BOT]) == ""
    assert program_differences((*marks[:-1], "package my_entente=0"), [BOT]).startswith("package my_entente is ")


def test_a_process_that_loads_an_edited_bot_is_refused(documented: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new process of a pool has the files of its start, also beside a match or folder of games of the former bot."""

    class Edited(ProcessPool):
        def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            (documented / "my_entente" / "bots.py").write_text("# edited")
            source_hash.cache_clear()
            with ThreadPoolExecutor(1) as process:
                return process.submit(work, *arguments)

    monkeypatch.setattr(teacher_games, "ProcessPool", Edited)
    said = "my_entente was edited since this command began: run it again"
    settings = ImitationSettings(teachers=(BOT,), games=2 * GAMES_A_SHARD, last_year=1901)
    with Edited(1) as pool:
        decider = SearchDecider(SearchSettings(scripted=("random",), proposals=0, player=(BOT,)), processes=pool)
        board, names = Board.start(), {"game": "", "rng_name": "", "snapshot_id": ""}
        legal = board.legal_orders()["FRANCE"]
        request = DecisionRequest(**names, phase_index=0, power="FRANCE", legal=legal, board=board, temperature=1.0)
        with pytest.raises(InputError, match=said):
            asyncio.run(decider.decide(request))
    source_hash.cache_clear()
    (documented / "my_entente" / "bots.py").write_text(BLOCKS["my_entente/bots.py"])
    with pytest.raises(InputError, match=said):
        make_games(tmp_path, settings, 2, lambda *_: None)
    assert not list(tmp_path.rglob("*.arrow"))


def test_only_a_user_s_bot_has_a_source_of_its_own(package: Callable[[dict[str, str]], Path]):
    package({"odd.py": "bot = None"})
    others = ["mover", "dumbbot+search", "v20", "policy", "league", "openai:some-model@http://127.0.0.1:8000/v1", "models/mine"]
    assert bot_sources(others) == {} and program_marks(others) == program_marks()
    assert bot_sources([*others, "odd:bot", "odd:bot+search"]) == {"odd": source_hash("odd")}
    assert match_label(MatchSettings(), [Contestant(name="other:v20", run="other", version=20)]), "of a run, not of a module"
    with pytest.raises(InputError, match="there is no package 'my_entente' here: install it"):
        bot_sources([BOT])


def test_the_reward_of_the_page_is_part_of_a_return(documented: Path):
    gained = [2.0, -1.0, 0.0, -3.0]
    components = {name: np.array(gained if name == "centres_gained" else [9.0] * 4) for name in COMPONENTS}
    assert reward_of(CAREFUL)(components).tolist() == [2.0, -2.0, 0.0, -6.0]
    rows = pa.table(
        {name: pa.array(values, pa.float32()) for name, values in components.items()}
        | {"shard": ["s"] * 4, "start_group": [0] * 4, "power": ["FRANCE"] * 4, "fork": [0, 0, 1, 1], "phase_index": [0, 1, 0, 1]}
    )
    assert returns_of(rows, {CAREFUL: 1.0}, 1.0).tolist() == [0.0, -2.0, -6.0, -6.0]
    reward_weights = {CAREFUL: 0.5, f"final_{CAREFUL}": 1.0, "centres_gained": 1.0}
    assert returns_of(rows, reward_weights, 0.0).tolist() == [3.0, -4.0, -6.0, -12.0]


def test_a_reward_that_writes_into_its_components_changes_no_other_reward(package):
    package(
        {
            "odd.py": "def clipped(c):\n    gained = c['centres_gained']\n    gained[gained < 0] = 0\n    return gained\n"
            "def plain(c):\n    return c['centres_gained']\n"
        }
    )
    rows = pa.table({name: pa.array([-1.0], pa.float32()) for name in COMPONENTS})
    place = pa.table({"shard": ["s"], "start_group": [0], "power": ["FRANCE"], "fork": [0], "phase_index": [0]})
    for name in place.column_names:
        rows = rows.append_column(name, place[name])
    assert returns_of(rows, {"odd:clipped": 1.0, "odd:plain": 1.0}, 1.0).tolist() == [-1.0]


def test_a_reward_that_is_no_number_in_some_row_is_named(package):
    package({"odd.py": "def ratio(c):\n    return c['centres_gained'] / c['units_dislodged']\n"})
    rows = {name: np.array([1.0, 0.0]) for name in COMPONENTS}
    with np.errstate(invalid="ignore"), pytest.raises(InputError, match="'odd:ratio' returned nan, which is not a finite number"):
        reward_of("odd:ratio")(rows)


def test_the_loss_of_the_page_is_the_formula_that_it_states(documented: Path):
    import torch

    from entente.training.losses import SampledTokens, policy_loss
    from entente.training.settings import TrainingSettings

    now, then, worth = [-0.1, -2.0, -1.0], [-0.4, -1.0, -900.0], [1.0, -2.0, 1.0]
    tokens = SampledTokens(
        logprobs=torch.tensor(now, requires_grad=True),
        behaviour=torch.tensor(then),
        advantages=torch.tensor(worth),
        decisions=torch.tensor([0, 0, 1]),
    )
    kind = policy_loss(PLAIN)
    found = kind.of(tokens, TrainingSettings(loss=PLAIN))
    expected = [-math.exp(a - b) * w for a, b, w in zip(now[:2], then[:2], worth[:2], strict=True)]
    assert found.loss.tolist() == pytest.approx([*expected, 0.0]) and found.outlier.tolist() == [False, False, True]
    assert kind.denominator(3, 2) == 3


def test_the_chat_template_of_the_page_holds_a_prompt(model: Path, tmp_path: Path):
    from entente.decoding.codec import Codec
    from entente.game.prompts import PromptSettings, board_text, power_text
    from entente.players.policy import Tokens
    from tests.chat_models import chat_model

    folder = chat_model(model, tmp_path / "model", BLOCKS["chat_template.jinja"])
    tokens, board = Tokens(Codec(folder), PromptSettings()), Board.start()
    legal = board.legal_orders()["FRANCE"]
    text = tokens.codec.decode(tokens.prompt_ids(board, legal))
    assert text.startswith("<|begin|><|system|>\nDiplomacy without press.")
    body = board_text(board, "FRANCE") + power_text(legal, board, cue="")
    assert text.endswith(f"<|user|>\n{body.strip()}\n<|assistant|>\nORDERS:\n")
    assert tokens.form.after_rules.moved == tokens.form.after_board.moved == 0


LOSS = """import torch
from entente.losses import PolicyLoss, TokenLoss
def of(tokens, settings):
    no = torch.zeros(4, dtype=bool)
    return {}
part = PolicyLoss(of=of, per_decision=False)
"""
DETACHED = "TokenLoss(loss=torch.ones(4), clipped_low=no, clipped_high=no, outlier=no)"


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        pytest.param("bot", "import missing_module\n", "cannot be loaded .ModuleNotFoundError", id="import"),
        pytest.param(
            "bot", "def part(legal):\n    return []\n", r"cannot be called with \(legal, rng, board\)", id="bot: arguments"
        ),
        pytest.param("loss", LOSS.format("1 / 0"), "failed when it was tried .ZeroDivision", id="loss: fails"),
        pytest.param("loss", LOSS.format(DETACHED), "without a gradient", id="loss: detached"),
        pytest.param("reward", "def part(c):\n    return 0.0\n", r"returns values of shape \(\) for 8 rows", id="reward: shape"),
        pytest.param(
            "reward",
            "def part(c):\n    return c['survival'] - c['survival'].mean()\n",
            "value depends on the other rows",
            id="reward: other rows",
        ),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_in_one_sentence(package, kind: str, code: str, said: str):
    from entente.training.losses import policy_loss

    package({"broken.py": code})
    get = {"bot": player, "loss": policy_loss, "reward": reward_of}[kind]
    with pytest.raises(InputError, match=rf"'broken:part' .*{said}") as refused:
        get("broken:part")
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2


def test_a_bot_that_orders_what_is_not_legal_or_fails_is_named(package):
    package(
        {
            "odd.py": "def illegal(legal, rng, board):\n    return ['A PAR - MOS']\n"
            "def fails(legal, rng, board):\n    return legal.nothing\n"
        }
    )
    board = Board.start()
    for name, said in (("illegal", "which is not a legal movement set"), ("fails", "failed for FRANCE .AttributeError")):
        with pytest.raises(InputError, match=rf"'odd:{name}' .*{said}"):
            player(f"odd:{name}")(board.legal_orders()["FRANCE"], random.Random(0), board)


def test_a_run_whose_package_is_gone_can_still_be_read(tmp_path: Path):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    tree = layered_settings("laptop", (), {"run": "mine", "runs_root": tmp_path / "runs"}).model_dump(mode="json")
    tree["training"]["loss"] = "gone_package.losses:gone"
    paths.settings.write_text(json.dumps(tree))
    assert settings_of(paths).training.loss == "gone_package.losses:gone"


def test_a_dry_run_refuses_a_loss_that_cannot_be_loaded(entente, package):
    site = package({"broken.py": "import missing_module"})
    done = entente("train", "--dry-run", "--training.loss", "broken:part")
    assert done.returncode == 2 and list(entente.folder.iterdir()) == [site]
    (line,) = done.stderr.strip().splitlines()
    assert re.search(r"training.loss: the loss 'broken:part' cannot be loaded .ModuleNotFoundError", line)


@pytest.mark.in_turn
@pytest.mark.system
def test_a_run_trains_with_the_bot_the_loss_and_the_reward_of_the_page(workplace, documented: Path, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(BLOCKS["mine.toml"])
    words = ["--config", "small.toml", "--config", str(file)]
    done = workplace.process("train", "--run", "extended", *words, PYTHONPATH=f"{ROOT}:{documented}")
    assert done.returncode == 0, done.stderr
    replayed = ("runs", "replay-step", "--run", "extended", "--step", "2")
    said = workplace(*replayed)
    assert said.returncode == 0 and "all agree bitwise" in said.stdout, said.stderr
    without = workplace.process(*replayed)
    assert without.returncode == 2 and f"'{CAREFUL}' cannot be loaded" in without.stderr


def module(name: str) -> ModuleType:
    """An example that is a whole module of this repository."""
    made = ModuleType(name)
    exec(compile(BLOCKS[name], name, "exec"), made.__dict__)
    return made


def test_the_lora_targets_of_the_page_are_the_layers_of_the_real_model_and_can_be_trained(monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, Phi3Config

    from entente.decoding import architectures
    from entente.training.policy import Policy
    from entente.training.settings import TrainingSettings

    monkeypatch.setattr(architectures, "FAMILIES", dict(architectures.FAMILIES))
    exec(BLOCKS["entente/decoding/architectures.py"], dict(vars(architectures)))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Phi3Config(**sizes, num_key_value_heads=2, vocab_size=100, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    found = architectures.architecture_of(config.to_dict(), "phi")
    blocks = {path: module for path, module in model.named_modules() if path.startswith("model.layers.")}
    real = {path: tuple(module.weight.shape) for path, module in blocks.items() if isinstance(module, torch.nn.Linear)}
    assert found.linear_layers() == real
    policy = Policy(model, TrainingSettings(lora_rank=4, device="cpu"))
    assert sum(weight.numel() for weight in policy.parameters()) == found.lora_parameters(4)


def test_the_recipe_of_the_page_says_how_prompts_of_an_adapter_are_written(tmp_path: Path):
    from entente.decoding.model_files import recipe_prompts
    from entente.game.prompts import PromptSettings

    (tmp_path / "recipe.json").write_text(BLOCKS["recipe.json"])
    assert recipe_prompts(tmp_path) == PromptSettings(**json.loads(BLOCKS["recipe.json"])["prompts"])
