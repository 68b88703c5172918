"""What a run starts from can be made beforehand, once, and looked at."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from state_cache.sampling import stratum_of
from state_cache.store import open_cache
from tests.command import Entente

MAKE_MODEL = ["model", "make", "--hidden", "32", "--layers", "1", "--source-games", "4", "--imitation-steps", "4"]
BUILD_CACHE = ["cache", "build", "--train-snapshots", "6", "--held-out-snapshots", "4", "--last-year", "1902"]

Built = tuple[Entente, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built_cache(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Built:
    """The command in a folder with a state cache, and the process that built it."""
    entente = Entente(tmp_path_factory.mktemp("cache"), PREFECT_API_URL=prefect_server)
    return entente, entente.process(*BUILD_CACHE)


def test_a_model_is_made_once_and_says_how_it_was_made(entente):
    made = entente(*MAKE_MODEL, "--imitation-positions", "1")
    assert made.returncode == 0, made.stderr
    folder = Path(made.stdout.strip())
    assert (entente.folder / folder).is_dir() and folder.parts[:2] == ("runs", "_models")
    again = entente(*MAKE_MODEL, "--imitation-positions", "1")
    assert again.stdout == made.stdout and "imitation" in made.stderr and "imitation" not in again.stderr

    shown = entente("model", "show", str(folder))
    assert (shown.returncode, shown.stderr) == (0, "")
    recipe = json.loads(shown.stdout.splitlines()[-1].removeprefix("recipe "))
    assert recipe["settings"]["hidden"] == 32 and recipe["settings"]["imitation_steps"] == 4
    tokenizer = json.loads((entente.folder / folder / "tokenizer.json").read_text())
    assert f"vocabulary {len(tokenizer['model']['vocab'])}, " in shown.stdout
    config = json.loads((entente.folder / folder / "config.json").read_text())
    assert f"longest sequence {config['max_position_embeddings']} tokens" in shown.stdout
    assert "chat format none: prompts are plain text" in shown.stdout


def test_a_model_with_a_chat_template_is_not_gone_on_from_without_it(entente: Entente, small_model: Path):
    folder = shutil.copytree(small_model, entente.folder / "chatty")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    done = entente("model", "imitate", "mine", "--begin-with", "chatty", "--last-year", "1901", "--games", "2", "--steps", "1")
    assert done.returncode == 2 and "is no model that `entente model imitate` made" in done.stderr


def test_labels_go_on_only_with_the_policy_and_the_prompts_that_they_began_with(entente: Entente, small_model: Path):
    shutil.copytree(small_model, entente.folder / "models" / "small")
    words = ["label", "one", "--player", "models/small", "--games", "4", "--years", "1", "--opponents", "random"]
    words += ["--search.player", "random", "--search.scripted", "mover", "--search.playouts", "2"]
    made = entente(*words)
    assert made.returncode == 0 and re.fullmatch(r"[1-9]\d* labels more in runs/_labels/one\n", made.stdout), made.stderr
    assert entente(*words).stdout == "0 labels more in runs/_labels/one\n"
    recipe = entente.folder / "models" / "small" / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"last"', '"in_place"'))
    changed = entente(*words)
    assert changed.returncode == 2 and "the labels in 'runs/_labels/one' were made with policy.form" in changed.stderr


@pytest.mark.system
def test_a_cache_is_built_once_and_shows_what_it_holds(built_cache: Built):
    entente, built = built_cache
    assert built.returncode == 0, built.stderr
    folder = Path(built.stdout.strip())
    assert folder.parts[:2] == ("runs", "_state_cache")
    again = entente.process(*BUILD_CACHE)
    assert again.stdout == built.stdout and "freezing" in built.stderr and "freezing" not in again.stderr

    shown = entente("cache", "show")
    assert (shown.returncode, shown.stderr) == (0, "")
    cache = open_cache(entente.folder / folder)
    for part, snapshots in (("train", cache.train), ("held out", cache.held_out)):
        games = len({snapshot.game_id for snapshot in snapshots})
        _, _, rest = shown.stdout.partition(f"{folder.name}, {part}: {len(snapshots)} positions from {games} source games\n")
        rows = re.findall(r"^ +(\d{4}) +(movement|adjustments|retreats) +(?:level|ahead|far ahead) +(\d+)", rest, re.MULTILINE)
        counted = Counter[tuple[int, str]]()
        for year, phases, count in rows[: len({stratum_of(snapshot) for snapshot in snapshots})]:
            counted[int(year), phases[0].upper()] += int(count)
        assert counted == Counter((snapshot.year, snapshot.phase_type) for snapshot in snapshots)


@pytest.mark.system
def test_a_cache_is_verified_and_a_damaged_one_is_named(entente, built_cache: Built):
    whole_one, built = built_cache
    shutil.copytree(whole_one.folder / "runs", entente.folder / "runs")
    folder = entente.folder / built.stdout.strip()
    whole = entente("cache", "verify")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout == f"whole    {folder.name}: 6 positions to train from, 4 held out\n"
    with (folder / "held_out.arrow").open("r+b") as file:
        file.truncate(100)
    damaged = entente("cache", "verify")
    assert damaged.returncode == 1
    assert damaged.stdout.startswith(f"damaged  {folder.name}: ") and "held_out.arrow" in damaged.stdout
