"""TRL's `rollout_func` over our legal tables: each completion spells exactly one legal order set.

transformers samples with the model that TRL trains, and a processor removes the logits of tokens that the table does not allow.
The log-probabilities returned are those of the draws, under the mask. TRL itself computes its ratios over the whole vocabulary,
because it knows no mask; docs/decisions.md says what that costs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from decoding.legal_table import END, LegalTable


class LegalMask(LogitsProcessor):
    """Leaves finite, in each row, the logits of the tokens with which its completion may go on."""

    def __init__(self, tables: Sequence[LegalTable]) -> None:
        """`tables`: one for each row of the batch."""
        self._tables = tables
        self._states: list[int] | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The masked scores.

        Args:
            input_ids: int64 [rows, tokens so far].
            scores: float [rows, vocabulary]; rows that have ended stay as they are.
        """
        if self._states is None:
            self._states = [table.start for table in self._tables]
        else:
            last = input_ids[:, -1].tolist()
            self._states = [
                END if state == END else table.advance(state, token)
                for table, state, token in zip(self._tables, self._states, last, strict=True)
            ]
        masked = torch.full_like(scores, -torch.inf)
        for row, (table, state) in enumerate(zip(self._tables, self._states, strict=True)):
            ids = slice(None) if state == END else torch.as_tensor(table.allowed(state), dtype=torch.long, device=scores.device)
            masked[row, ids] = scores[row, ids]
        return masked


def legal_rollouts(prompt_ids: Mapping[str, Sequence[int]], tables: Mapping[str, LegalTable]) -> Callable[..., dict[str, Any]]:
    """A `rollout_func` for prompts whose ids and tables are given by their text."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        model, end = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class.eos_token_id
        own = [tables[prompt] for prompt in prompts]
        ids = [list(prompt_ids[prompt]) for prompt in prompts]
        width = max(map(len, ids))
        padded = torch.tensor([[end] * (width - len(row)) + row for row in ids], device=model.device)
        attended = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
        with torch.no_grad():
            drawn = model.generate(
                input_ids=padded,
                attention_mask=attended,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(table.longest for table in own),
                eos_token_id=end,
                pad_token_id=end,
                logits_processor=LogitsProcessorList([LegalMask(own)]),
                return_dict_in_generate=True,
                output_scores=True,
            )
        completions = [row[: row.index(end) + 1] for row in drawn.sequences[:, width:].tolist()]
        logprobs = [
            [float(drawn.scores[place][row].log_softmax(-1)[token]) for place, token in enumerate(completion)]
            for row, completion in enumerate(completions)
        ]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    return roll_out
