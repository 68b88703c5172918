"""What imitation costs: the packed step beside a padded one, and beside the matrix rate of this machine.

The default model and its prompts on a teacher's positions, on one thread, in CPU seconds; a figure is the median of the rounds'
ratios, after a warm-up. The padded arm computes each decision alone, in the order in which they come, with as many tokens a
micro-batch. Operations are those of the linear layers and the head for each unique token, forward and backward: 6 times the
weights. Attention scores, norms and the optimiser are left out, as in `arithmetic_floor`. Making examples of positions is a part
of the step.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.arithmetic_floor import matrix_flops_per_s, weights_of
from benchmarks.outcome import timed
from pipeline.threads import usable_cores
from telemetry.progress import reporter
from training.imitation.examples import Example
from training.imitation.imitate import Imitation, prepare
from training.imitation.loss import PackedExamples, backward, pack
from training.imitation.positions import Positions
from training.imitation.settings import ImitationSettings
from training.imitation.teacher_games import make_games
from training.settings import CPU_TOKENS, TrainingSettings


def imitation_figures(scratch: Path, *, repeats: int, seed: int) -> dict[str, float]:
    """Figures of a step of imitation with its default settings.

    Args:
        scratch: an empty folder for games and model.
    """
    settings = ImitationSettings(games=8, seed=seed)
    positions = Positions(make_games(scratch / "games", settings, 1, reporter().stage))
    folder = scratch / "model"
    folder.mkdir()
    prepare(folder, settings, positions)
    imitation = Imitation(folder, settings, positions)
    numbers = positions.of_step(0, settings.positions, seed)

    def make() -> tuple[list[Example], PackedExamples]:
        found = [each for number in numbers for each in imitation.examples.of(*positions.board(number))]
        return found, pack(found, settings.prompt_weight)

    examples, packed = make()
    rounds = []
    for number in range(repeats + 1):  # the first warms up
        made_s, _ = timed(make)
        packed_s, _ = timed(lambda: backward(imitation.model, packed))
        short_s, _ = timed(lambda: backward(imitation.model, packed, bfloat16=True))
        padded_s, _ = timed(lambda: _padded_backward(imitation.model, examples, settings.prompt_weight))
        rounds.append((made_s, packed_s, padded_s, short_s))
        reporter().say(f"imitation, round {number}: examples {made_s:.2f} s, packed {packed_s:.2f} s, padded {padded_s:.2f} s")
    weights, unique = weights_of(folder, TrainingSettings()), packed.packed.unique_tokens
    rate = matrix_flops_per_s(folder) / usable_cores()
    spent = median(made + step for made, step, *_ in rounds[1:])
    return {
        "imitation_packed_speedup": median(padded / step for _, step, padded, _ in rounds[1:]),
        "imitation_unique_token_share": unique / packed.packed.raw_tokens,
        "imitation_examples_share": median(made / (made + step) for made, step, *_ in rounds[1:]),
        "imitation_bfloat16_speedup": median(step / short for _, step, _, short in rounds[1:]),
        "imitation_tokens_per_core_s": unique / spent,
        "imitation_matrix_share": 6 * (weights.base + weights.head) * unique / spent / rate,
    }


def _padded_backward(model: Any, examples: Sequence[Example], prompt_weight: float) -> None:
    """The gradient of the same loss from padded rows."""
    whole = sum(prompt_weight * (each.prompt - 1) + len(each.ids) - each.prompt for each in examples)
    longest = max(len(each.ids) for each in examples)
    rows = max(1, CPU_TOKENS // longest)
    for first in range(0, len(examples), rows):
        some = examples[first : first + rows]
        ids, weights = np.zeros((len(some), longest), np.int64), np.zeros((len(some), longest), np.float32)
        for row, each in enumerate(some):
            ids[row, : len(each.ids)] = each.ids
            weights[row, 1 : each.prompt], weights[row, each.prompt : len(each.ids)] = prompt_weight, 1
        logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[:, 1:]).flatten(), reduction="none")
        (loss @ torch.from_numpy(weights[:, 1:]).flatten() / whole).backward()
