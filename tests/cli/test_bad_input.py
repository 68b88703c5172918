"""Bad input is one sentence on standard error and exit code 2, and nothing is written."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    ["train"],
    ["cache", "build"],
    ["cache", "show"],
    ["model", "make"],
    ["model", "show"],
    ["serve"],
    ["evaluate"],
    ["sql"],
]


def entente(folder: Path, *words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *words]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "ENTENTE_"))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=kept | (environment or {}))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--preset", "desktop"], "there is no preset 'desktop'"),
        (["train", "--stepz", "3"], "--stepz"),
        (["train", "--steps", "0"], "steps: input should be greater than or equal to 1"),
        (["train", "--steps", "many"], "many"),
        (["train", "--rollouts.opponents", "nobody"], "nobody"),
        (["train", "--rollouts.policy-powers", "SPAIN"], "SPAIN"),
        (["train", "--inference.model", "./nowhere"], "model './nowhere' is neither a folder"),
        (["train", "--inference.model", "bare"], "model 'bare' has no config.json"),
        (["train", "--inference.urls", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["train", "--pipeline.buffer-depth", "3", "--pipeline.no-deterministic"], "exceeds storage.max_policy_lag 2"),
        (["train", "--run", "taken"], "run 'taken' exists already"),
        (["train", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--model", "bare", "--host", "0.0.0.0"], "needs a key"),
        (["serve", "--model", "bare", "--port", "{busy}"], "choose another --port"),
        (["serve", "--model", "bare", "--port", "0"], "has no config.json"),
        (["evaluate", "--run", "nothing"], "there is no run in"),
        (["sql", "--run", "nothing", "select 1"], "nothing"),
        (["sql", "--run", "taken", "selec 1"], "SQL failed"),
        (["sql", "--run", "taken", "copy decisions to 'stolen.csv'"], "SQL failed"),
        (["sql", "--run", "taken", "select * from read_csv('secret.csv')"], "SQL failed"),
        (["cache", "show"], "there is no state cache"),
        (["model", "show", "bare"], "has no config.json"),
        (["dance"], "dance"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_one_sentence_exit_code_two_and_nothing_written(tmp_path: Path, model: Path, words: list[str], sentence: str):
    (tmp_path / "bare").mkdir()
    (tmp_path / "secret.csv").write_text("a\n1\n")
    if "taken" in words:
        from flows.run_settings import layered_settings
        from storage.runs import RunPaths

        taken = RunPaths(tmp_path / "runs" / "taken").create()
        taken.settings.write_text(layered_settings("laptop").model_dump_json())
    if "--inference.urls" in words:
        words = [*words, "--inference.model", str(model), "--cache.train-snapshots", "4", "--cache.held-out-snapshots", "4"]
        words += ["--evaluation.positions", "2"]
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        before = sorted(tmp_path.rglob("*"))
        done = entente(tmp_path, *(word.replace("{busy}", str(busy.getsockname()[1])) for word in words))
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("entente: ")]
    assert len(lines) == 1 and sentence in lines[0] and "Traceback" not in done.stderr
    shared = ("runs/_state_cache", ".prefect")
    written = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert not [path for path in written if not str(path.relative_to(tmp_path)).startswith(shared) and path != tmp_path / "runs"]


def test_debug_shows_the_traceback(tmp_path: Path):
    done = entente(tmp_path, "train", "--preset", "desktop", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr and "InputError" in done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_examples_and_loads_nothing_heavy(tmp_path: Path, words: list[str]):
    program = (
        "import sys\nfrom cli.main import run\ncode = run(sys.argv[1:])\n"
        "print([name for name in ('torch', 'vllm', 'prefect', 'wandb') if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Example" in done.stdout and "entente " + words[0] in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"
    assert list(tmp_path.iterdir()) == []


def test_the_command_list_says_what_each_command_does(tmp_path: Path):
    done = entente(tmp_path, "--help")
    for name in ("train", "cache", "serve", "evaluate", "sql", "model"):
        (line,) = [line for line in done.stdout.splitlines() if line.strip("│ ").startswith(name)]
        assert len(line.strip("│ ").split()) > 3, line
