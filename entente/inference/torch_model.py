"""A causal model in transformers, with its own key-value rows and switchable LoRA adapters.

One forward pass takes any number of tokens of each of many rows, packed without padding; only attention handles rows
separately. The base weights never change: the active adapter adds its low-rank product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from entente.decoding.architectures import read_architecture
from entente.decoding.weight_files import load_whole
from entente.inference.adapter_check import AdapterFacts
from entente.records.policy_version import ADAPTER_WEIGHTS

_ATTENTION = "entente_rows"
_COLUMNS = 64
"""The number of columns is a multiple of this."""
_HEAD_PART = 8192
"""Rows of the output head converted to float32 at a time, at most."""


class KeyValueRows:
    """Keys and values of token sequences: one row per sequence, one column per position."""

    def __init__(self, config: Any, most: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = config.num_attention_heads
        self._head = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._layers, self._heads = config.num_hidden_layers, config.num_key_value_heads
        self._most, self._dtype, self._device = most, dtype, device
        self.values = self._new(0, 0)
        """[layers, keys or values, rows, heads, columns, head size]"""

    def _new(self, rows: int, columns: int) -> Tensor:
        shape = (self._layers, 2, rows, self._heads, columns, self._head)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def reserve(self, rows: int, columns: int) -> None:
        """Grow to at least `rows` and `columns`; existing values are kept."""
        old_rows, old_columns = self.values.shape[2], self.values.shape[4]
        if rows <= old_rows and columns <= old_columns:
            return
        rows = max(rows, min(2 * old_rows, self._most)) if rows > old_rows else old_rows
        columns = max(-(-columns // _COLUMNS) * _COLUMNS, old_columns)
        grown = self._new(rows, columns)
        grown[:, :, :old_rows, :, :old_columns] = self.values
        self.values = grown

    def copy(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copy the first `columns` of each source row to its target row; reads all rows before writing any."""
        read = torch.tensor(sources, device=self._device)
        taken = self.values[:, :, :, :, :columns].index_select(2, read)
        self.values[:, :, torch.tensor(targets, device=self._device), :, :columns] = taken


class ForwardPlan:
    """Rows and columns of the packed tokens of one forward pass; the rows are [first, first + len(lengths))."""

    def __init__(self, store: KeyValueRows, first: int, starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> None:
        """`starts` and `lengths`, int64 [rows]: first new column of each row, and number of new columns."""
        rows = len(lengths)
        ends = np.cumsum(lengths)
        row = np.repeat(np.arange(rows), lengths)
        offset = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
        self.last = torch.from_numpy(ends - 1).to(device)
        """int64 [rows]: index of each row's last packed token."""
        self.positions = torch.from_numpy(starts[row] + offset).to(device)
        self._columns = int((starts + lengths).max())
        self._store, self._first, self._rows = store, first, rows
        self._row, self._offset = torch.from_numpy(row).to(device), torch.from_numpy(offset).to(device)
        self._longest = int(lengths.max())
        query = starts[:, None] + np.minimum(np.arange(self._longest), lengths[:, None] - 1)
        self._query = torch.from_numpy(query).to(device)[:, :, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Write `key` and `value` [key heads, tokens, size], then attend from `query` [heads, tokens, size]; returns [tokens,
        heads, size]. `window`: a token sees itself and the `window` - 1 before it; None: all."""
        rows = slice(self._first, self._first + self._rows)
        keys, values = self._store.values[layer].unbind(0)
        where = self._row + self._first
        keys[where, :, self.positions] = key.transpose(0, 1)
        values[where, :, self.positions] = value.transpose(0, 1)
        heads, tokens, size = query.shape
        shared = heads // key.shape[0]
        if window is not None and window >= self._columns:
            window = None
        if window not in self._masks:
            mask = self._additive(window, query.dtype)
            self._masks[window] = mask.repeat(1, shared, 1)[:, None]  # query heads that share a key head are stacked
        attended = nn.functional.scaled_dot_product_attention(
            self._by_row(query.transpose(0, 1).reshape(tokens, key.shape[0], shared, size)),
            keys[rows, :, : self._columns],
            values[rows, :, : self._columns],
            attn_mask=self._masks[window],
            scale=scale,
        )
        if self._longest == 1:
            return attended.reshape(tokens, heads, size)
        attended = attended.unflatten(2, (shared, self._longest))
        return attended[self._row, :, :, self._offset].reshape(tokens, heads, size)

    def _additive(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, longest, columns]: 0 where a token sees a column, else -inf."""
        column = torch.arange(self._columns, device=self._query.device)
        seen = self._query >= column
        if window is not None:
            seen &= self._query - column < window
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def _by_row(self, packed: Tensor) -> Tensor:
        """[tokens, key heads, shared, size] -> [rows, key heads, shared * longest, size], padded with zeros."""
        _, heads, shared, size = packed.shape
        if self._longest == 1:
            return packed
        padded = packed.new_zeros(self._rows, heads, shared, self._longest, size)
        padded[self._row, :, :, self._offset] = packed
        return padded.flatten(2, 3)


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    step: ForwardPlan = options["step"]
    window = options.get("sliding_window")
    attended = step.attend(module.layer_idx, query[0], key[0], value[0], options["scaling"], window)  # type: ignore[arg-type]
    return attended[None], None


AttentionInterface.register(_ATTENTION, _attend_rows)


@dataclass(slots=True)
class _ActiveAdapter:
    name: str = ""


class _AdaptedLinear(nn.Module):
    """A frozen linear layer plus scale * B @ A of the active adapter, if that adapter changes this layer."""

    def __init__(self, base: nn.Linear, active: _ActiveAdapter) -> None:
        super().__init__()
        self.base, self.active = base, active
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        """Adapter -> A transposed [in, rank], and scale * B transposed [rank, out]."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.base(inputs)
        part = self.parts.get(self.active.name)
        if part is None:
            return outputs
        flat = outputs.view(-1, outputs.shape[-1])
        return torch.addmm(flat, inputs.reshape(-1, inputs.shape[-1]) @ part[0], part[1]).view_as(outputs)


class TorchModel:
    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        """Raises InputError if the model's family is unknown, or it lacks weights."""
        read_architecture(folder)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new shape, and each token has one
        wanted = dtype if dtype == "auto" else getattr(torch, dtype)
        logging.disable_progress_bar()
        model = load_whole(AutoModelForCausalLM.from_pretrained, folder, dtype=wanted, attn_implementation=_ATTENTION)
        self.device = device
        self._model = model.to(device).eval().requires_grad_(False)
        self._head = self._model.get_output_embeddings()
        self._active = _ActiveAdapter()
        self._linear: dict[str, _AdaptedLinear] = {}
        self.vocabulary_size = int(self._head.weight.shape[0])

    def new_rows(self, most: int) -> KeyValueRows:
        return KeyValueRows(self._model.config, most, self._model.dtype, self.device)

    def add_adapter(self, name: str, folder: Path, facts: AdapterFacts) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        for key in tensors:
            if ".lora_A." in key:
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                a = tensors[key].to(self.device, self._model.dtype)
                b = (facts.scale * tensors[key.replace(".lora_A.", ".lora_B.")].float()).to(self.device, self._model.dtype)
                self._adapted(module).parts[name] = (a.T.contiguous(), b.T.contiguous())

    def remove_adapter(self, name: str) -> None:
        for linear in self._linear.values():
            linear.parts.pop(name, None)

    def activate(self, name: str) -> None:
        """Use the adapter `name` from now on; an unknown name means the base model alone."""
        self._active.name = name

    def forward(self, token_ids: np.ndarray, step: ForwardPlan) -> Tensor:
        """Compute packed int32 `token_ids`, store their keys and values; returns each row's last state [rows, hidden]."""
        packed = torch.from_numpy(token_ids).to(self.device)[None]
        states = self._model.model(
            input_ids=packed, position_ids=step.positions[None], use_cache=False, step=step
        ).last_hidden_state
        return states[0, step.last]

    def open_logits(self, states: Tensor, excluded: Sequence[int], end: int) -> np.ndarray:
        """float32 logits of all ids below `end` except `excluded`, ascending, for each of `states` [rows, hidden]."""
        # The head is converted in parts, because a whole one in float32 may take gigabytes.
        parts = [
            nn.functional.linear(
                states.float(),
                self._head.weight[first : min(first + _HEAD_PART, end)].float(),
                None if self._head.bias is None else self._head.bias[first : min(first + _HEAD_PART, end)].float(),
            )
            for first in range(0, end, _HEAD_PART)
        ]
        return np.delete(torch.cat(parts, 1).cpu().numpy(), excluded, axis=1)

    def legal_logits(self, states: Tensor, counts: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """float32 logits [sum of counts] of `token_ids`; `counts` of them belong to each of `states` [rows, hidden]."""
        row = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self.device)
        column = torch.from_numpy(token_ids).to(self.device)
        logits = (states.float()[row] * self._head.weight[column].float()).sum(-1)
        if self._head.bias is not None:
            logits += self._head.bias[column].float()
        return logits.cpu().numpy()

    def _adapted(self, module: str) -> _AdaptedLinear:
        if module not in self._linear:
            parent, _, child = module.rpartition(".")
            linear = _AdaptedLinear(self._model.get_submodule(module), self._active)
            setattr(self._model.get_submodule(parent), child, linear)
            self._linear[module] = linear
        return self._linear[module]
