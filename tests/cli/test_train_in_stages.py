"""`entente train --preset hour`: shipped presets can be run, mistakes are found before the first stage, a kill loses nothing."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from pipeline.stages import read_staged, staged_names
from tests.command import runs

_STAGES = """
cores = 1
memory_gib = 0.5
games = 7
years = 1
opponents = "random"

[[stages]]
name = "imitate"
commands = ["model imitate {run}-imitate --teachers random --games 4 --hidden 32 --layers 1 --steps 30 --checkpoint-minutes 0"]
model = "{run}-imitate"
"""


@pytest.mark.parametrize("preset", staged_names())
def test_the_train_commands_of_shipped_presets_can_be_planned(entente, preset: str):
    base = Path(__file__).parents[2] / "models" / "dumbbot-192"
    for stage in read_staged(preset).stages:
        for line in stage.commands:
            words = line.replace("{run}", "mine").replace("{seed}", "0").replace("{base}", str(base)).split()
            if (words[0] == "train" and "--resume" not in words) or words[:2] == ["model", "imitate"]:
                planned = entente(*words, "--dry-run", "--json")
                assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --run x --training.learning-rate fast", "stage 'late' cannot run 'entente train': training.learning_rate"),
        ("improve --run x --roundz 2", "stage 'late' cannot run 'entente improve'"),
        ("dance", "stage 'late' cannot run 'entente dance'"),
    ],
    ids=["value", "flag", "command"],
)
def test_a_mistake_in_the_last_stage_is_said_before_the_first(entente, tmp_path: Path, line: str, said: str):
    late = f'\n[[stages]]\nname = "late"\ncommands = ["{line}"]\nmodel = "x"\n'
    (tmp_path / "mine.toml").write_text(_STAGES + late)
    ended = entente("train", "--preset", "mine.toml", "--run", "first")
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3"], "so steps cannot be given"),
        (["--config", "mine.toml"], "takes neither --config nor --fork-lineage"),
        (["--resume"], "no training 'hour' was begun"),
        (["--resume", "--seed", "3"], "keeps its seed"),
    ],
    ids=["setting", "file", "resume", "seed"],
)
def test_what_belongs_to_one_run_is_refused(entente, words: list[str], said: str):
    ended = entente("train", "--preset", "hour", *words)
    assert ended.returncode == 2 and said in ended.stderr


@pytest.mark.system
def test_a_killed_training_ends_its_command_and_is_continued(entente, prefect_server: str, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(_STAGES)
    words, checkpoints = (
        ("train", "--preset", "mine.toml", "--run", "first"),
        tmp_path / "runs" / "_models" / ".first-imitate.imitation",
    )
    with entente.start(*words) as process:
        until = time.monotonic() + 120
        while not list(checkpoints.glob("*checkpoint*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        command = [each for each in psutil.Process(process.pid).children() if runs(each, "imitate")]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL and len(command) == 1, "it was killed in its imitation"
    assert not psutil.wait_procs(command, timeout=20)[1], "the command ends with its parent"
    ended = entente.process(*words, "--resume", "--json", PREFECT_API_URL=prefect_server)
    assert ended.returncode == 0, ended.stderr
    assert "model imitate first-imitate --resume" in ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert [stage["stage"] for stage in result["stages"]] == ["imitate"] and result["stages"][0]["games"] == 7
    again = entente(*words, "--resume", "--json")
    assert again.returncode == 0 and json.loads(again.stdout.splitlines()[-1]) == result, "what is done is not done again"
    assert "model imitate" not in again.stderr
