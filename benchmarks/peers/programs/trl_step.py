"""TRL's GRPO step on given rows: `python -m benchmarks.peers.programs.trl_step`.

The loss is TRL's own (`GRPOTrainer.compute_loss`), over rows padded to the longest of their forward. The old log-probabilities
are those of the model before the first step, as TRL keeps them from sampling.
"""

import gc
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.peers.programs.answer import serve
from benchmarks.peers.programs.trl_trainer import trainer_of

ROWS_EACH = (8, 16, 32, 64)
"""Rows of a forward that are tried; the fastest is measured. TRL's default is 8."""


class Step:
    """The trainer with the rows, after `load`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="entente-peers-")

    def load(self, given: Any) -> Mapping[str, Any]:
        """Make the trainer and read the rows; tries the sizes of a forward."""
        settings = given["settings"]
        self._trainer = trainer_of(settings, [{"prompt": "none"}] * 8, _no_reward, self._folder.name)
        self._model, self._clip = self._trainer.model, settings["max_gradient_norm"]
        self._model.train()
        self._optimiser = self._trainer.create_optimizer()
        rows = dict(np.load(given["rows"]))
        spent = {}
        for size in ROWS_EACH:
            self._chunks = [_padded(rows, first, size) for first in range(0, len(rows["prompt_lens"]), size)]
            self._keep_old_logprobs()
            self.step(None)
            spent[size] = self.step(None)["cpu_s"]
        size = min(spent, key=lambda each: spent[each])
        self._chunks = [_padded(rows, first, size) for first in range(0, len(rows["prompt_lens"]), size)]
        self._keep_old_logprobs()
        return {
            "rows_each": size,
            "decisions": sum(len(chunk["advantages"]) for chunk in self._chunks),
            "completion_tokens": sum(int(chunk["completion_mask"].sum()) for chunk in self._chunks),
        }

    def step(self, _: Any) -> Mapping[str, Any]:
        """One step over all rows; answers CPU seconds."""
        gc.collect()
        began = time.process_time()
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = len(self._chunks)
        for chunk in self._chunks:
            trainer.accelerator.backward(trainer.compute_loss(self._model, chunk))
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        norm = float(torch.nn.utils.clip_grad_norm_(weights, self._clip))
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        spent = time.process_time() - began
        if not norm > 0:
            raise ValueError(f"TRL's gradient has the norm {norm}")
        return {"cpu_s": spent}

    def _keep_old_logprobs(self) -> None:
        for chunk in self._chunks:
            ids = torch.cat([chunk["prompt_ids"], chunk["completion_ids"]], 1)
            mask = torch.cat([chunk["prompt_mask"], chunk["completion_mask"]], 1)
            length = chunk["completion_ids"].shape[1]
            with torch.no_grad():
                logits = self._model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(2, chunk["completion_ids"][:, :, None])[:, :, 0]
            chunk["old_per_token_logps"] = chosen


def _no_reward(**given: Any) -> list[float]:
    raise AssertionError("the step is measured on given rows")


def _padded(rows: Mapping[str, np.ndarray], first: int, size: int) -> dict[str, torch.Tensor]:
    """`size` rows from `first` on: prompts padded on the left, completions on the right, as TRL does."""
    prompts, completions = [], []
    for row in range(first, min(first + size, len(rows["prompt_lens"]))):
        ids = rows["input_ids"][rows["input_offsets"][row] : rows["input_offsets"][row + 1]]
        prompts.append(ids[: rows["prompt_lens"][row]])
        completions.append(ids[rows["prompt_lens"][row] :])
    shapes = [(len(each), max(map(len, each))) for each in (prompts, completions)]
    ids = [np.zeros(shape, np.int64) for shape in shapes]
    masks = [np.zeros(shape, np.int64) for shape in shapes]
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[0][number, shapes[0][1] - len(prompt) :], masks[0][number, shapes[0][1] - len(prompt) :] = prompt, 1
        ids[1][number, : len(completion)], masks[1][number, : len(completion)] = completion, 1
    return {
        "prompt_ids": torch.from_numpy(ids[0]),
        "prompt_mask": torch.from_numpy(masks[0]),
        "completion_ids": torch.from_numpy(ids[1]),
        "completion_mask": torch.from_numpy(masks[1]),
        "advantages": torch.from_numpy(rows["advantages"][first : first + size]),
    }


if __name__ == "__main__":
    program = Step()
    serve({"load": program.load, "step": program.step})
