"""TRL's side of `entente bench peers`: `PYTHON trl_program.py FOLDER`, with `settings.json` in the folder.

It runs in an environment that has TRL, and imports nothing of this project. Each line of input is answered with one line of JSON.

- With `rows.npz` it does GRPO steps on these rows. The first answer is what was loaded, each further one the CPU time of a step.
  The loss is TRL's own (`GRPOTrainer.compute_loss`), over rows padded to the longest of their forward. The old log-probabilities
  are those of the model before the first step, as TRL keeps them from sampling.
- With `tables.npz` the whole trainer draws, asks for rewards and learns. Each answer is a batch of completions, and the next line
  gives their rewards; the last answer says what training took. Masked or not, TRL's loss is over the whole vocabulary.
"""

import gc
import json
import math
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Step:
    """The trainer with the rows."""

    def __init__(self, given: Path, scratch: str) -> None:
        """Make the trainer and read the rows; tries the sizes of a forward."""
        settings = json.loads((given / "settings.json").read_text())
        self._trainer = trainer_of(settings, scratch)
        self._model, self._clip = self._trainer.model, settings["max_gradient_norm"]
        self._model.train()
        self._optimiser = self._trainer.create_optimizer()
        self._rows = dict(np.load(given / "rows.npz"))
        sizes = settings["rows_each"]
        self._rows_each = min(sizes, key=self._seconds_with) if len(sizes) > 1 else sizes[0]
        self._cut(self._rows_each)

    def _seconds_with(self, size: int) -> float:
        """CPU seconds of a step with `size` rows a forward, after one to warm up."""
        self._cut(size)
        self.step()
        return self.step()["cpu_s"]

    def loaded(self) -> dict[str, Any]:
        """What is trained on."""
        return {
            "rows_each": self._rows_each,
            "decisions": sum(len(chunk["advantages"]) for chunk in self._chunks),
            "completion_tokens": sum(int(chunk["completion_mask"].sum()) for chunk in self._chunks),
        }

    def step(self) -> dict[str, Any]:
        """One step over all rows."""
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
        """Cut the rows into chunks of `size`, with the model's log-probabilities as the old ones."""
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


class Walks:
    """The tokens that legal tables allow after each completion of a batch, token by token."""

    def __init__(self, tables: Sequence[Mapping[str, np.ndarray]], after_end: int) -> None:
        """Start at the first node of each table.

        Args:
            tables: `offsets`, `token_ids` and `next_nodes` for each completion.
            after_end: token that fills up a complete one.
        """
        self._tables, self._nodes, self._after_end = tables, [0] * len(tables), after_end

    def allowed(self, row: int) -> list[int]:
        """What may come next in completion `row`."""
        first, last = self._edges(row)
        return self._tables[row]["token_ids"][first:last].tolist() or [self._after_end]

    def follow(self, row: int, token: int) -> None:
        """Completion `row` goes on with `token`, which is allowed there."""
        first, last = self._edges(row)
        if first < last:
            edge = first + int(np.searchsorted(self._tables[row]["token_ids"][first:last], token))
            self._nodes[row] = int(self._tables[row]["next_nodes"][edge])

    def _edges(self, row: int) -> tuple[int, int]:
        node, offsets = self._nodes[row], self._tables[row]["offsets"]
        return (int(offsets[node]), int(offsets[node + 1])) if node >= 0 else (0, 0)


class WholeTrainer:
    """TRL's trainer on prompts; it learns until the CPU seconds of this process and of its rewards are spent."""

    def __init__(self, given: Path, scratch: str, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`ask` gets the rewards of a batch of completions."""
        settings = json.loads((given / "settings.json").read_text())
        self._ask, self._whole = ask, settings["whole"]
        prompts, forks, updates = self._whole["prompts"], self._whole["forks"], self._whole["updates"]
        self._batch = self._whole["groups"] * forks
        size = math.gcd(self._batch // updates, settings["rows_each"][0])
        self._trainer = trainer_of(
            settings,
            scratch,
            [{"prompt": prompt["text"], "number": number} for number, prompt in enumerate(prompts)],
            self._reward,
            loss_type="dapo",  # the mean over all tokens of an update, also where it takes several forwards
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=self._whole["warm_up_updates"],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=self._batch // updates // size,
            steps_per_generation=self._batch // size,
            num_generations=forks,
            shuffle_dataset=False,
            max_completion_length=self._whole["longest"],
            max_steps=1_000_000,
        )
        arrays = dict(np.load(given / "tables.npz"))
        names = ("offsets", "token_ids", "next_nodes")
        tables = [{name: arrays[f"{name}_{number}"] for name in names} for number in range(len(prompts))]
        self._tables = {tuple(prompt["ids"]): table for prompt, table in zip(prompts, tables, strict=True)}
        self._generate, self._trainer.model.generate = self._trainer.model.generate, self._sample
        self._rewards_s = self._sampling_s = 0.0
        self._ends: list[float] = []
        """CPU seconds at the end of each batch."""

    def train(self) -> dict[str, Any]:
        """Train and save the adapter."""
        from transformers import TrainerCallback

        def after_update(_: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % self._whole["updates"] == 0:
                self._ends.append(self._spent_s())
                # The first batch warms up, so that a second one is needed for a rate.
                control.should_training_stop = len(self._ends) > 1 and self._ends[-1] >= self._whole["budget_s"]

        self._trainer.add_callback(type("StopWhenSpent", (TrainerCallback,), {"on_step_end": after_update})())
        self._began = time.process_time()
        self._trainer.train()
        self._trainer.model.save_pretrained(self._whole["adapter"])
        return {
            "decisions_per_cpu_s": (len(self._ends) - 1) * self._batch / (self._ends[-1] - self._ends[0]),
            "steps": len(self._ends),
            "cpu_s": self._ends[-1],
            "sampling_share": self._sampling_s / self._ends[-1],
            "peak_mib": peak_mib(),
        }

    def _spent_s(self) -> float:
        return time.process_time() - self._began + self._rewards_s

    def _reward(self, completions: list[str], number: list[int], **more: Any) -> list[float]:
        reply = self._ask({"texts": completions, "numbers": number, "spent_s": self._spent_s()})
        self._rewards_s += reply["cpu_s"]
        return reply["rewards"]

    def _sample(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> torch.Tensor:
        """TRL's sampling, timed, and under the mask if it is asked for."""
        began, width = time.process_time(), input_ids.shape[1]
        tables = [self._tables.get(tuple(ids[seen == 1].tolist())) for ids, seen in zip(input_ids, attention_mask, strict=True)]
        found = [table for table in tables if table is not None]
        if len(found) < len(tables):
            raise ValueError("TRL's tokenizer reads a prompt as other ids than ours")
        walks = Walks(found, self._trainer.processing_class.pad_token_id)

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            if len(ids) > width:
                walks.follow(row, int(ids[-1]))
            return walks.allowed(row)

        if self._whole["masked"]:
            more["prefix_allowed_tokens_fn"] = allowed
        drawn = self._generate(input_ids=input_ids, attention_mask=attention_mask, **more)
        self._sampling_s += time.process_time() - began
        return drawn


def peak_mib() -> float:
    """Peak memory of this process so far. Linux counts the parent's into `ru_maxrss`, but not into VmHWM."""
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on a Mac


def no_reward(**given: Any) -> list[float]:
    """The reward of a trainer that is only given rows."""
    raise AssertionError("the step is measured on given rows")


def trainer_of(
    settings: dict[str, Any],
    folder: str,
    prompts: Sequence[dict[str, Any]] = ({"prompt": "none"},) * 8,
    reward: Callable[..., list[float]] = no_reward,
    **more: Any,
) -> Any:
    """A GRPO trainer of TRL that trains like ours: the same adapter, loss, clipping and optimiser.

    Args:
        more: further arguments of TRL's `GRPOConfig`.
    """
    # Only the environment of this program has these.
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        # TRL looks at the installed vLLM while it is imported; it is not used here.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    usual = dict[str, Any](
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # its default recomputes activations, which costs a third more
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
    config = GRPOConfig(**(usual | more))
    adapter = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=0.0,
        target_modules=settings["layers"],
        task_type="CAUSAL_LM",
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(prompts)),
        processing_class=tokenizer,
        peft_config=adapter,
    )


def main() -> None:
    """Answer each line of input until it ends. Whatever else TRL prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = Path(sys.argv[1])

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        answer(question)
        return json.loads(sys.stdin.readline())

    with tempfile.TemporaryDirectory(prefix="entente-peers-") as scratch:
        if (given / "tables.npz").exists():
            whole = WholeTrainer(given, scratch, ask)
            sys.stdin.readline()
            answer(whole.train())
            return
        step = Step(given, scratch)
        for number, _ in enumerate(sys.stdin):
            answer(step.step() if number else step.loaded())


if __name__ == "__main__":
    main()
