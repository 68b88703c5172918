"""TRL's arm of `entente bench peers`: `PYTHON trl_program.py FOLDER`, where FOLDER has `settings.json` and `rows.npz`.

Imports nothing of this project. Answers each line of input with a line of JSON: first the size of the step, then the CPU time of
one step each. The loss is TRL's (`GRPOTrainer.compute_loss`), over rows padded to the longest of their batch. The old
log-probabilities are those of the model before the first step, as TRL records them during sampling.
"""

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Step:
    def __init__(self, inputs: Path, scratch: str) -> None:
        settings = json.loads((inputs / "settings.json").read_text())
        self._trainer = trainer_of(settings, scratch)
        self._model, self._clip = self._trainer.model, settings["max_gradient_norm"]
        self._model.train()
        self._optimiser = self._trainer.create_optimizer()
        self._rows = dict(np.load(inputs / "rows.npz"))
        sizes = settings["rows_each"]
        self._rows_each = min(sizes, key=self._seconds_with) if len(sizes) > 1 else sizes[0]
        self._cut(self._rows_each)

    def _seconds_with(self, size: int) -> float:
        self._cut(size)
        self.step()
        return self.step()["cpu_s"]

    def loaded(self) -> dict[str, Any]:
        return {
            "rows_each": self._rows_each,
            "decisions": sum(len(chunk["advantages"]) for chunk in self._chunks),
            "completion_tokens": sum(int(chunk["completion_mask"].sum()) for chunk in self._chunks),
        }

    def step(self) -> dict[str, Any]:
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

    def _cut(self, size: int) -> None:
        self._chunks = [padded(self._rows, first, size) for first in range(0, len(self._rows["prompt_lens"]), size)]
        for chunk in self._chunks:
            ids = torch.cat([chunk["prompt_ids"], chunk["completion_ids"]], 1)
            mask = torch.cat([chunk["prompt_mask"], chunk["completion_mask"]], 1)
            length = chunk["completion_ids"].shape[1]
            with torch.no_grad():
                logits = self._model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
            chosen = torch.log_softmax(logits, -1).gather(2, chunk["completion_ids"][:, :, None])[:, :, 0]
            chunk["old_per_token_logps"] = chosen


def padded(rows: Mapping[str, np.ndarray], first: int, size: int) -> dict[str, torch.Tensor]:
    """`size` rows from `first` on: prompts padded on the left, completions on the right, as in TRL."""
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


def no_reward(**_: Any) -> list[float]:
    raise AssertionError("the rows have advantages, so TRL must not compute rewards")


def trainer_of(settings: dict[str, Any], folder: str) -> Any:
    # Only the environment of this program has these packages.
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        # TRL checks the installed vLLM on import; this program does not use it.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's default recomputes activations, a third more compute
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings["max_gradient_norm"],
        beta=0.0,
        loss_type="bnpo",  # the mean over all tokens, as ours
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        delta=settings["dual_clip"],
        scale_rewards="none",
        disable_dropout=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        seed=settings["seed"],
    )
    adapter = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=0.0,
        target_modules=settings["layers"],
        task_type="CAUSAL_LM",
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=no_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * 8),
        processing_class=tokenizer,
        peft_config=adapter,
    )


def main() -> None:
    """Answer each line of input. TRL's own output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as scratch:
        step = Step(Path(sys.argv[1]), scratch)
        for number, _ in enumerate(sys.stdin):
            print(json.dumps(step.step() if number else step.loaded()), file=answers, flush=True)


if __name__ == "__main__":
    main()
