"""The trainer of the old way: from a step's JSON files to a new adapter.

Files are read whole, and prompts and completions are tokenised a second time. The new tokens may differ from the drawn ones, so
log-probabilities are cut or filled to fit. Advantages are standardised in their group (one game, power, phase), clipped at ten,
and standardised again over the batch; groups without spread are dropped. A step has one update, with gradients clipped at ten.

Rows are padded, four at a time. The reference (the model without its adapter, without gradient) and the policy each have a
forward. Both have a log-softmax over the whole vocabulary at every position, including prompt and padding. The loss is a clipped
ratio with a sampled KL term over the completion; without the divergence, reference and term are left out. The old system
requested gradient checkpointing but left the model in evaluation mode, where transformers ignores it. The loss is that of the
unmasked policy, so its gradient differs from ours.
Cheaper than the original: no top-100 entropy of every position, ratios by token instead of sequence, no dropout.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from decoding.model_files import eos_token_id
from inference.adapter_check import version_in
from records.policy_version import PolicyVersion
from storage.gather import Batch
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater

ROWS_EACH = 4
"""Rows in a forward."""
KL_WEIGHT, CLIP = 0.01, 0.2
MAX_ADVANTAGE, MAX_GRADIENT_NORM = 10.0, 10.0
MIN_VARIANCE = 0.01
"""min_reward_variance of the old system: groups whose returns vary less are dropped."""


class OldTrainer:
    """Old training steps of a peft model; gradients accumulate in its adapter."""

    def __init__(self, model: Any, *, divergence: bool) -> None:
        """`divergence`: compute the reference and add the divergence from it to the loss."""
        self._model, self._divergence = model, divergence
        self._device = next(model.parameters()).device
        self._half = any(weight.dtype == torch.bfloat16 for weight in model.parameters())

    def accumulate(self, batch: Batch, advantages: np.ndarray) -> float:
        """Forward and backward over all rows of `batch`; returns the loss, a mean over completion tokens.

        Args:
            advantages: float32 [rows].
        """
        denominator, total = int(batch.completion_offsets[-1]), 0.0
        # With a bfloat16 base the adapter's products are bfloat16 too, as in our step.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            for first in range(0, len(batch.prompt_lens), ROWS_EACH):
                rows = range(first, min(first + ROWS_EACH, len(batch.prompt_lens)))
                loss = self._loss(_pad(batch, rows, advantages, self._device)) / denominator
                loss.backward()
                total += float(loss.detach())
        return total

    def _loss(self, rows: dict[str, Tensor]) -> Tensor:
        reference = None
        if self._divergence:
            with torch.no_grad(), self._model.disable_adapter():
                reference = self._logprobs(rows)
        logprobs = self._logprobs(rows)
        ratio = torch.exp(logprobs - rows["behaviour"])
        loss = -torch.minimum(ratio * rows["advantage"], torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * rows["advantage"])
        if reference is not None:
            off = reference - logprobs
            loss = loss + KL_WEIGHT * (torch.exp(off) - off - 1)
        return (loss * rows["completion"]).sum()

    def _logprobs(self, rows: dict[str, Tensor]) -> Tensor:
        """[R, L - 1] log-probability of each next token over the whole vocabulary."""
        logits = self._model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        return torch.gather(logprobs, 2, rows["ids"][:, 1:, None])[:, :, 0]


def _pad(batch: Batch, rows: Sequence[int], advantages: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Rows padded on the right; columns of next tokens are one shorter."""
    lengths = np.diff(batch.input_offsets)[list(rows)]
    shape = (len(rows), int(lengths.max()))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    behaviour, completion = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for here, row in enumerate(rows):
        length, prompt = int(lengths[here]), int(batch.prompt_lens[row])
        ids[here, :length] = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        mask[here, :length] = 1
        first, last = batch.completion_offsets[row], batch.completion_offsets[row + 1]
        behaviour[here, prompt:length] = batch.behaviour_logprobs[first:last]
        completion[here, prompt:length] = 1
    columns = {"ids": ids, "mask": mask, "behaviour": behaviour[:, 1:], "completion": completion[:, 1:]}
    columns["advantage"] = advantages[list(rows)].astype(np.float32)[:, None]
    return {name: torch.from_numpy(np.ascontiguousarray(column)).to(device) for name, column in columns.items()}


class Learner:
    """Trains a policy step by step."""

    def __init__(self, model: Path, settings: TrainingSettings, adapters: Path) -> None:
        """`adapters` gets the adapters. The loss has a divergence from the base only if `settings` have a weight for it."""
        self._tokenizer, self._eos = Tokenizer.from_file(str(model / "tokenizer.json")), eos_token_id(model)
        self._policy, self._adapters = Policy(model, settings), adapters
        self._optimiser = Updater(self._policy, settings).optimiser
        self._trainer = OldTrainer(self._policy.model, divergence=bool(settings.kl_weight))

    def learn(self, step: int, files: Path) -> tuple[int, PolicyVersion]:
        """Train on the rows of `step`, which lie in the folder `files`; returns their number and the new version."""
        batch = read_rows(files, self._tokenizer, self._eos)
        if len(batch.returns):
            self._policy.model.zero_grad(set_to_none=True)
            self._trainer.accumulate(batch, standardise(batch.returns, batch.advantage_groups))
            torch.nn.utils.clip_grad_norm_(self._policy.parameters(), MAX_GRADIENT_NORM)
            self._optimiser.step()
        adapter = self._adapters / f"v{step:06d}"
        adapter.parent.mkdir(parents=True, exist_ok=True)
        self._policy.save_adapter(adapter)
        return len(batch.returns), version_in(adapter, step)


def standardise(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Old advantages: standardised in each group, clipped, then standardised over all rows."""
    advantages = np.zeros(len(returns))
    for group in np.unique(groups):
        own = groups == group
        advantages[own] = (returns[own] - returns[own].mean()) / max(float(returns[own].std()), 1e-8)
    advantages = np.clip(advantages, -MAX_ADVANTAGE, MAX_ADVANTAGE)
    spread = float(advantages.std())
    return ((advantages - advantages.mean()) / max(spread, 1e-8)).astype(np.float32)


def read_rows(files: Path, tokenizer: Tokenizer, eos: int) -> Batch:
    """The rows of a step whose group has at least two members and spread. Legal sets are empty: the old trainer had none."""
    members: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(files.glob("rollout-*.json")):
        for record in json.loads(file.read_text()):
            record["prompt_ids"] = tokenizer.encode(record["prompt"], add_special_tokens=False).ids
            record["completion_ids"] = [*tokenizer.encode(record["completion"], add_special_tokens=False).ids, eos]
            members.setdefault(record["group_id"], []).append(record)
    groups = [own for own in members.values() if len(own) > 1 and np.var([each["reward"] for each in own]) > MIN_VARIANCE]
    return _as_batch([record for own in groups for record in own], np.repeat(np.arange(len(groups)), [*map(len, groups)]))


def _as_batch(records: Sequence[Mapping[str, Any]], groups: np.ndarray) -> Batch:
    ids = [[*record["prompt_ids"], *record["completion_ids"]] for record in records]
    lengths = [len(record["completion_ids"]) for record in records]
    fitted = [
        [*given[:length], *[0.0] * (length - len(given))]
        for given, length in zip((record["completion_logprobs"] for record in records), lengths, strict=True)
    ]
    return Batch(
        decision_ids=np.arange(len(records), dtype=np.int64),
        input_ids=np.array([token for row in ids for token in row], np.int32),
        input_offsets=np.cumsum([0, *map(len, ids)]),
        prompt_lens=np.array([len(record["prompt_ids"]) for record in records], np.int32),
        behaviour_logprobs=np.array([value for row in fitted for value in row], np.float32),
        completion_offsets=np.cumsum([0, *lengths]),
        legal_ids=np.zeros(0, np.int32),
        legal_offsets=np.zeros(sum(lengths) + 1, np.int64),
        temperatures=np.ones(len(records), np.float32),
        returns=np.array([record["reward"] for record in records], np.float64),
        advantage_groups=groups.astype(np.int32),
        policy_versions=np.zeros(len(records), np.int32),
    )
