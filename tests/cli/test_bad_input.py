"""Bad input is one sentence on standard error and exit code 2, said before anything is written."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from entente.settings.layers import layered_settings
from storage.runs import RunPaths
from tests.cli.test_commands import LEAVES

PUBLISHED = Path(__file__).parents[2] / "models" / "whole-192"
HEAVY = ("torch", "vllm", "prefect", "wandb")


@pytest.fixture
def folder(entente) -> Path:
    """Where the command runs: a run called `taken`, a model called `bare` without a tokenizer, and someone's file."""
    taken = RunPaths(entente.folder / "runs" / "taken").create()
    taken.settings.write_text(layered_settings("laptop").model_dump_json())
    (entente.folder / "bare").mkdir()
    (entente.folder / "bare" / "config.json").write_text("{}")
    (entente.folder / "secret.csv").write_text("a\n1\n")
    (entente.folder / "steps.toml").write_text("steps = 3\n[rollouts]\nforks = 2\n")
    (entente.folder / "nested.toml").write_text(f"seed = {'[' * 300}{']' * 300}")
    os.mkfifo(entente.folder / "pipe.json")
    return entente.folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file and folder, byte for byte; Prefect makes a home for itself as it is imported."""
    ours = (path for path in folder.rglob("*") if ".prefect" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in ours}


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    """One line, the sentence, on standard error; exit code 2."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("entente: ") and sentence in line
    assert done.stdout == ""


REFUSED = [
    (["train", "--stepz", "3"], "--stepz. Did you mean --steps?"),
    (["train", "--prompts.examples", "6"], "prompts.examples are for a model that was not trained on the game"),
    (["train", "--steps", "0"], "steps: input should be greater than or equal to 1, got '0'"),
    (["train", "--inference.model", "bare"], "model 'bare' has no tokenizer.json"),
    (["train", "--run", "taken"], "run 'taken' exists already in runs: continue it with --resume, or choose"),
    (["train", "--resume"], "--resume continues an existing run: name it with --run"),
    (
        ["train", "--resume", "--run", "nothing"],
        "there is no run in 'runs/nothing': it has no settings.json; runs there: taken",
    ),
    (["train", "--resume", "--run", "taken", "--seed", "9"], "seed"),
    (["train", "--resume", "--run", "taken", "--preset", "laptop"], "a resumed run keeps its own settings: leave out --preset"),
    (["train", "--config", "missing.toml"], "settings file 'missing.toml' cannot be read"),
    (["train", "--rollouts.learning-rate", "1"], "--rollouts.learning-rate. Did you mean --training.learning-rate?"),
    (["label", "mine", "--player", "dumbbot"], "--player 'dumbbot' is no folder of a model or adapter"),
    (["label", "mine", "--player", "newest"], "--player 'newest' is no folder of a model or adapter"),
    (["replay", "--run", "taken", "--output", "page.html"], "--output and --open are for the page of one game"),
    (["model", "imitate", "mine", "--games", "0"], "games is 0: imitation trains on some and holds out others"),
    (["model", "imitate", "mine", "--games", "2", "--labels", "nope"], "there are no labels in 'nope': make some with"),
    (["model", "imitate", "mine", "--begin-with", "bare"], "model 'bare' has no tokenizer.json"),
    (["enter", "http://127.0.0.1:9/api.php", "--game", "friday"], "--game names 'friday': games of webDiplomacy have numbers"),
    (["enter", "http://127.0.0.1:9/api.php", "--game", "²"], "--game names '²': games of webDiplomacy have numbers"),
    (
        ["enter", "http://127.0.0.1:9/api.php", "--player", "dumbbot", "--search.playouts", "4"],
        "--search settings are given, but no player searches",
    ),
    (
        ["enter", "127.0.0.1:9", "--game", "friday", "--player", "dumbbot", "--search.playouts", "4"],
        "--search settings are given, but no player searches",
    ),
    (["play", "--temperature", "0.5"], "--temperature would have no effect, because no player is a version or a model"),
    (["train", "--config", "nested.toml"], "seed: input should be a valid integer"),
    (["cache", "show", "--runs-root", "elsewhere"], "there is no state cache in 'elsewhere/_state_cache'"),
    (["model", "make", "--hidden", "33"], "hidden: input should be a multiple of 32, got '33'"),
    (["model", "imitate", "strong", "--config", "steps.toml"], "there is no setting 'rollouts'"),
    (["model", "imitate", "strong", "--recorded", "missing.jsonl"], "the recorded games 'missing.jsonl' cannot be read"),
    (["serve", "--openai", "--model", "bare", "--run", "taken"], "--model 'bare' is what is served: leave out"),
    (["serve", "--openai", "--model", "bare", "--version", "2"], "--model 'bare' is what is served: leave out"),
    (["serve", "--openai", "--model", f"{PUBLISHED}+search"], "+search' is no folder of a model or adapter: name one, such as"),
    (["serve", "--openai", "--model", "openai:m@http://127.0.0.1:9/v1"], "is no folder of a model or adapter: name one, such as"),
    (["serve", "--model", "bare", "--engine", "torch"], "starts vLLM's server on this machine: leave out --engine torch"),
    (["serve", "--model", "bare", "--urls", "http://10.0.0.5:8100"], "on this machine: leave out --urls"),
    (["serve", "--model", "bare", "--host", "0.0.0.0"], "a server on 0.0.0.0 needs a key"),
    (["serve", "--model", "bare", "--port", "{busy}"], "cannot listen on 127.0.0.1:{busy}"),
    (["serve", "--model", "bare", "--port", "99999"], "--port. Must be <= 65535"),
    (["play", "--power", "narnia"], "there is no power 'NARNIA'"),
    (["play", "--game", "pipe.json"], "game file 'pipe.json' cannot be read: it is not a regular file"),
    (["evaluate", "--run", "taken", "--positions", "9999"], "evaluation.positions 9999 exceeds cache.held_out_snapshots"),
    (["evaluate", "--players", "dumbbot", "--years", "1"], "'dumbbot' would play only against itself"),
    (["evaluate", "--players", "dumbbot", "--protocol", "one-table"], "'dumbbot' would play only against itself"),
    (["evaluate", "--players", "dumbbot,hold", "--version", "20"], "--version and --positions belong to the score on held-out"),
    (["evaluate", "--run", "taken", "--version", "-5"], "--version. Versions are numbers from 0, or -1 for the newest"),
    (["export", "--run", "taken", "--to", "out", "--version", "-5"], "Versions are numbers from 0, or -1 for the newest"),
    (["serve", "--openai", "--run", "taken", "--version", "-5"], "--version '-5' is no version: give a number from 0, base or"),
    (["evaluate", "--players", "dumbbot,hold", "--positions", "3"], "--version and --positions belong to the score on held-out"),
    (
        ["evaluate", "--run", "taken", "--players", "mover+search,random", "--search.player", "policy"],
        "no scripted player 'policy'",
    ),
    (["watch", "--run", "taken", "--interval-s", "0"], "--interval-s. Must be > 0"),
    (["replay", "--run", "taken", "--last", "0"], "--last. Must be >= 1"),
    (["runs", "replay-step", "--run", "taken", "--step", "-1"], "--step. Must be >= 1"),
    (["runs", "explain", "0", "--run", "taken"], "STEP. Must be >= 1"),
    (["runs", "what-if", "--game", "0/0", "--run", "taken", "--seed", "-1"], "--seed. Must be >= 0"),
    (["runs", "what-if", "--game", "0/0", "--run", "taken", "--temperature", "0"], "--temperature. Must be > 0"),
    (["runs", "what-if", "--game", "0/0", "--run", "taken", "--temperature", "nan"], "--temperature. Must be <= 4"),
    (["play", "--temperature", "-1"], "--temperature. Must be > 0"),
    (["evaluate", "--players", "hold,random", "--temperature", "nan"], "temperature"),
    (["evaluate", "--players", "hold,random", "--games", "0"], "--games. Must be >= 1"),
    (["cache", "refresh", "--run", "taken", "--share", "1"], "--share. Must be < 1"),
    (["up", "--port", "0"], "--port. Must be >= 1"),
    (["bench", "e2e", "--steps", "0"], "--steps. Must be >= 1"),
    (["bench", "tune", "--run", "taken", "--rounds", "0"], "rounds"),
    (["enter", "here", "--game", "a"], "'here' is no address of a server"),
    (["enter", "here:²", "--game", "a"], "'here:²' is no address of a server"),
    (["sql", "--run", "taken", "select * from moves"], "SQL failed: Catalog Error"),
    (["sql", "--run", "taken", "copy decisions to 'stolen.csv'"], "ask one question with SELECT"),
    (["sql", "--run", "taken", "select * from read_csv('secret.csv')"], 'Cannot access file "secret.csv"'),
    (["evaluate", "--opponents", "random", "mover"], "'mover' belongs to no option of `entente evaluate`; repeat an option"),
    (
        ["evaluate", "--players", "models/whole-192"],
        "there is no folder 'models/whole-192', so it cannot play: name the folder of",
    ),
    (["model", "make", "small", "--runs-root=~/runs"], "a shell leaves '~' as it is after '=': write --runs-root ~/runs"),
    (["dance"], 'Unknown command "dance". `entente --help` lists all.'),
    (["trian"], "Did you mean train?"),
    (["runs", "explian"], "Did you mean runs explain?"),
    (["explain-run"], "Did you mean runs explain?"),
]
IDS = [" ".join(words)[:60] for words, _ in REFUSED]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=IDS)
def test_bad_input_is_one_sentence_and_nothing_is_written(entente, folder: Path, words: list[str], sentence: str):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        before = content(folder)
        done = entente(*(word.replace("{busy}", port) for word in words))
    refused(done, sentence.replace("{busy}", port))
    assert content(folder) == before


def test_help_and_commands_that_only_look_or_plan_load_nothing_heavy(entente, folder: Path):
    """One process: help, which imports no library at all; the help of each command; a question; a diagnosis; a dry run."""
    libraries = ["cyclopts", "rich", "pydantic", "pyarrow", "numpy", "duckdb"]
    asked = [(["--help"], [*HEAVY, *libraries]), *(([*words.split(), "--help"], HEAVY) for words in LEAVES)]
    asked += [(["sql", "--run", "taken", "select 1 as one"], HEAVY), (["doctor"], HEAVY)]
    asked += [(["train", "--dry-run"], HEAVY[1:])]
    program = f"""
import json, sys
from entente.cli.main import run
found = [(words, run(words), [name for name in absent if name in sys.modules]) for words, absent in {asked}]
print(json.dumps(found), file=sys.stderr)
"""
    before = content(folder)
    done = entente.process(program=program)
    assert json.loads(done.stderr.splitlines()[-1]) == [[words, 0, []] for words, _ in asked]
    assert content(folder) == before
