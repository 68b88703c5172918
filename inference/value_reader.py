"""Reads the value head of one policy version: what it foretells after some prompts.

It owns a copy of the base model with the version's adapter, beside the engine that draws, because engines return no hidden
states. Equal prompts in equal batches give equal values.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from inference.adapter_check import check_adapter
from inference.choose_engine import engine_here
from inference.settings import InferenceSettings
from inference.torch_engine import MAX_RANK, best_device
from inference.torch_model import Step, TorchModel
from records.policy_version import BASE_HASH, PolicyVersion
from records.value_head import HEAD_FILE, base_head, read_head
from telemetry.errors import InputError

_TOKENS = 8192
"""Most tokens of a forward, padding included."""


class ValueReader:
    """The `ValueSource` of one version."""

    def __init__(self, model: Path, policy: PolicyVersion, settings: InferenceSettings) -> None:
        """Load base, adapter and head: on the torch engine's device where that engine draws, else on the CPU, because another
        engine plans with all memory of its GPU.

        Args:
            model: folder of the base model.

        Raises:
            InputError: the version has no value head, or one of another base.
            DataError: adapter or head is damaged.
        """
        is_base = policy.adapter_hash == BASE_HASH
        file = base_head(model) if is_base else policy.folder / HEAD_FILE
        if not file.is_file():
            raise InputError(
                f"policy version {policy.version} has no value head ('{file}' is missing): train its run with "
                "training.value_weight above 0, or make its base with --value-weight"
            )
        self._head = read_head(file, model)
        device = best_device() if engine_here(settings)[0] == "torch" else torch.device("cpu")
        self._model = TorchModel(model, settings.dtype, device)
        if not is_base:
            self._model.add_adapter(policy.adapter_hash, policy.folder, check_adapter(policy, model, MAX_RANK))
            self._model.activate(policy.adapter_hash)

    async def values(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """See `search.leaves.ValueSource`."""
        return await asyncio.to_thread(self.read, prompts)

    def read(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """What is foretold after the prompts, token ids: float32 [n, 2], as records/value_head.py defines it."""
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        found = np.empty((len(prompts), 2), np.float32)
        while order:
            count = max(1, min(len(order), _TOKENS // len(prompts[order[-1]])))
            some, order = order[-count:], order[:-count]
            found[some] = self._head.values(self._states([np.asarray(prompts[place], np.int32) for place in some]))
        return found

    @torch.inference_mode()
    def _states(self, prompts: list[np.ndarray]) -> np.ndarray:
        """The last hidden state of each prompt's last token, float32 [prompts, width]."""
        lengths = np.array([len(ids) for ids in prompts], np.int64)
        rows = self._model.new_rows(len(prompts))
        rows.reserve(len(prompts), int(lengths.max()))
        step = Step(rows, 0, np.zeros(len(prompts), np.int64), lengths, self._model.device)
        return self._model.forward(np.concatenate(prompts), step).float().cpu().numpy()
