"""What a run starts from can be made beforehand, once, and looked at."""

import json
import re
from pathlib import Path

MAKE_MODEL = ["model", "make", "--hidden", "32", "--layers", "1", "--source-games", "4", "--imitation-steps", "4"]
BUILD_CACHE = ["cache", "build", "--train-snapshots", "6", "--held-out-snapshots", "4", "--last-year", "1902"]


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


def test_a_cache_is_built_once_and_shows_what_it_holds(entente, prefect_server: str):
    built = entente(*BUILD_CACHE)  # with no Prefect server at hand it brings its own
    assert built.returncode == 0, built.stderr
    folder = Path(built.stdout.strip())
    assert folder.parts[:2] == ("runs", "_state_cache")
    again = entente(*BUILD_CACHE, PREFECT_API_URL=prefect_server)
    assert again.stdout == built.stdout and "freezing" in built.stderr and "freezing" not in again.stderr

    shown = entente("cache", "show")
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if folder.name in line]
    assert [(row[1], row[2]) for row in rows] == [("train", "6"), ("held out", "4")]
    for row in rows:
        years = {int(year): int(count) for year, count in re.findall(r"(\d{4}): (\d+)", row[4])}
        assert sum(years.values()) == int(row[2]) and set(years) <= {1901, 1902}
        assert 1 <= int(row[3]) <= int(row[2]), "source games"
