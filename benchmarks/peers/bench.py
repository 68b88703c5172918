"""`peers`: CPU time of one GRPO step of TRL over that of ours, on the same rows of a real run; above 1, ours is faster.

Both arms do forward, backward, gradient clipping and optimiser step over all decisions of a step, in float32, with the same base
model, adapter, learning rate, clipped loss and completion tokens. Ours computes the policy over the legal set, and shared
prefixes once. TRL computes it over the whole vocabulary, row by row, without activation recomputation (its default), in the
fastest of several batch sizes. TRL runs in a separate environment (`trl_program.py`) and is idle while ours is measured.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.laptop_run import model_of, record_rows
from benchmarks.outcome import Outcome, Target, cpu_seconds, require_result
from entente.settings.find_model import TINY
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.progress import reporter
from entente.training.micro_batches import plan
from entente.training.policy import Policy
from entente.training.settings import DUAL_CLIP, MAX_GRADIENT_NORM, TrainingSettings
from entente.training.update import Updater

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS_EACH = (8, 16, 32, 64)
"""Candidate batch sizes of TRL with the tiny model; the benchmark uses the fastest."""
ROWS_EACH_OF_A_MODEL = (8,)
"""TRL's default. With a real model larger batches are not faster, and 64 rows need 30 GB."""
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
_PROGRAM = Path(__file__).with_name("trl_program.py")


def trl_settings(model: Path, training: TrainingSettings, rows_each: Sequence[int]) -> dict[str, object]:
    return {
        "model": str(model),
        "rank": training.lora_rank,
        "alpha": training.lora_alpha,
        "layers": list(training.lora_targets) or LAYERS,
        "learning_rate": training.learning_rate,
        "max_gradient_norm": MAX_GRADIENT_NORM,
        "clip_low": training.clip_low,
        "clip_high": training.clip_high,
        "dual_clip": DUAL_CLIP,
        "seed": training.seed,
        "rows_each": list(rows_each),
    }


def bench_peers(settings: RunSettings, arguments: Sequence[str], trl_python: Path, *, rounds: int = 5) -> Outcome:
    """The ratio, seconds of each arm, and the size of the step. Raises InputError if there is no such environment, and
    DataError if TRL's arm trained on other rows."""
    check_python(trl_python)
    batch, advantages = record_rows(settings, arguments)
    # TRL's program does so, also beside a card: CPU seconds of a card's step are those of starting its kernels.
    training = settings.training.model_copy(update={"device": "cpu", "dtype": "float32"})
    model = model_of(settings)
    rows_each = ROWS_EACH if settings.inference.model == TINY else ROWS_EACH_OF_A_MODEL
    rows, updater = range(len(batch.prompt_lens)), Updater(Policy(model, training), training)
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder:
        names = ("input_ids", "input_offsets", "prompt_lens")
        np.savez(Path(folder) / "rows.npz", advantages=advantages, **{name: getattr(batch, name) for name in names})
        (Path(folder) / "settings.json").write_text(json.dumps(trl_settings(model, training, rows_each)))
        with start(trl_python, folder) as child:
            loaded = ask(child)
            require_result(loaded["decisions"] == len(rows), "the same decisions in TRL's arm")
            require_result(loaded["completion_tokens"] == int(batch.completion_offsets[-1]), "the same tokens in TRL's arm")
            arms = {
                "ours": lambda: cpu_seconds(lambda: updater.apply(updater.accumulate(batch, rows, advantages))),
                "trl": lambda: ask(child)["cpu_s"],
            }
            turns = take_turns(arms, rounds)
    metrics = {
        "trl_step": median(spent["trl"] / spent["ours"] for spent in turns),
        "trl_step_s": median(spent["trl"] for spent in turns),
        "ours_step_s": median(spent["ours"] for spent in turns),
        "step_decisions": float(len(rows)),
        "step_unique_token_share": sum(micro.tokens for micro in plan(batch, rows, updater.tokens)) / len(batch.input_ids),
        "trl_step_rows_a_forward": float(loaded["rows_each"]),
    }
    return Outcome(benchmark="peers", metrics=metrics, targets={"trl_step": Target(at_least=1.0)})


def take_turns(arms: Mapping[str, Callable[[], float]], rounds: int) -> list[dict[str, float]]:
    """CPU seconds of each arm in each round, after a warm-up round. Every second round has the reverse order."""
    measured = []
    for number in range(rounds + 1):
        names = list(arms) if number % 2 else list(arms)[::-1]
        spent = {name: arms[name]() for name in names}
        reporter().say(f"round {number} of {rounds}: " + ", ".join(f"{name} {spent[name]:.3g} s" for name in arms))
        measured.append(spent)
    return measured[1:]


def check_python(trl_python: Path) -> None:
    if not trl_python.is_file():
        raise InputError(f"there is no '{trl_python}' to run TRL: docs/performance.md says how to make its environment")


def start(python: Path, folder: str) -> "subprocess.Popen[str]":
    """TRL's program on one thread; it exits at the end of its input."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(python), str(_PROGRAM), folder]
    environment = kept | _QUIET | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(child: "subprocess.Popen[str]") -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write("\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError) as error:
        raise EntenteError(f"TRL's program ended with {child.wait()}; its error is above") from error
