"""`trl_step`: one GRPO step of TRL on the rows of a real run, beside ours on the same rows.

Both arms do one forward, backward, clipping of the gradient and optimiser step over all decisions of a step, in float32, with the
same base model, adapter, learning rate and clipped loss, over the same completion tokens. Ours computes the policy over the legal
set and shared prefixes once. TRL computes it over the whole vocabulary, row by row, without recomputation (its default would
recompute) and in the fastest of several batch sizes.
"""

import tempfile
from pathlib import Path

from benchmarks.laptop_run import RecordedRows
from benchmarks.outcome import cpu_seconds, require_found
from benchmarks.peers.child import Child
from benchmarks.peers.environments import python_of
from benchmarks.peers.turns import OURS, middle, ratio, take_turns
from training.policy import Policy
from training.settings import DUAL_CLIP, MAX_GRADIENT_NORM, TrainingSettings
from training.trie_plan import plan
from training.update import Updater

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers that an adapter changes by default."""


def trl_settings(model: Path, training: TrainingSettings) -> dict[str, object]:
    """What `programs.trl_trainer.trainer_of` needs to train like us."""
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
    }


def trl_step_figures(
    recorded: RecordedRows, model: Path, training: TrainingSettings, environments: Path, *, rounds: int
) -> dict[str, float]:
    """The ratio, seconds of each arm, and the size of the step.

    Raises:
        DataError: TRL's arm trained on other rows.
    """
    batch, rows = recorded.batch, range(len(recorded.batch.prompt_lens))
    updater = Updater(Policy(model, training), training)
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder:
        file = Path(folder) / "rows.npz"
        recorded.write(file)
        with Child(python_of("trl_step", environments), "trl_step") as child:
            told = child.request("load", {"rows": str(file), "settings": trl_settings(model, training)})
            require_found(told["decisions"] == len(rows), "the same decisions in TRL's arm")
            require_found(told["completion_tokens"] == int(batch.completion_offsets[-1]), "the same tokens in TRL's arm")
            turns = take_turns(
                {
                    OURS: lambda _: cpu_seconds(lambda: updater.apply(updater.accumulate(batch, rows, recorded.advantages))),
                    "trl_step": lambda _: child.request("step")["cpu_s"],
                },
                rounds,
                "trl_step",
            )
    unique = plan(batch, rows, updater.budget.tokens).unique_tokens
    return {
        "trl_step": ratio(turns, "trl_step"),
        "trl_step_s": middle(turns, "trl_step"),
        "ours_step_s": middle(turns, OURS),
        "step_decisions": float(len(rows)),
        "step_unique_token_share": unique / len(batch.input_ids),
        "trl_step_rows_a_forward": float(told["rows_each"]),
    }
