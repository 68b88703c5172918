"""What a completion's log-probabilities should be: a plain transformers forward over the text, and a loop over positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion
from training.mismatch import Mismatch

Drawn = Sequence[tuple[GenerationRequest, Generation]]
_SPARE = 1.2
"""The reference is loaded in float32 where so many times its weights are free."""


def reference_logprobs(model: Any, request: GenerationRequest, generation: Generation) -> np.ndarray:
    """Masked log-probabilities of a completion, float64 [completion tokens], by one forward in the model's number format.

    Raises:
        DataError: the completion is not one that the request's table allows.
    """
    tokens = generation.token_ids.tolist()
    legal_ids, offsets = request.table.legal_sets(tokens)
    with torch.no_grad():
        ids = torch.tensor([[*request.prompt_ids, *tokens]], device=model.device)
        logits = model(input_ids=ids).logits[0].double() / request.temperature
    found = []
    for position, token in enumerate(tokens):
        row = logits[len(request.prompt_ids) + position - 1]
        legal = legal_ids[offsets[position] : offsets[position + 1]].tolist()
        found.append(float(row[token] - torch.logsumexp(row[legal], 0)))
    return np.array(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Completions held against the reference."""

    gap: Mismatch
    """Differences of log-probabilities over branching tokens, nats."""
    forced: int
    """Tokens with a single legal id."""
    uncertain: int
    """Forced tokens whose log-probability was not 0; there must be none."""
    dtype: str
    """Number format of the reference."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The model as transformers computes it: in float32, or in the engine's format on a card that is too small for that."""

    model: Any
    dtype: str

    @classmethod
    def load(cls, folder: Path, device: str, dtype: str, policy: PolicyVersion | None = None) -> "Reference":
        """Load it; the engine must have freed its memory. `policy`: the version that drew, with an adapter."""
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        widened = weights * (2 if dtype == "bfloat16" else 1)
        if device == "cpu" or _SPARE * widened < torch.cuda.mem_get_info()[0]:
            dtype = "float32"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model = model.to(device)
        if policy is not None:
            model = PeftModel.from_pretrained(model, str(policy.folder))
        return cls(model.eval(), dtype)

    def check(self, drawn: Drawn) -> Checked:
        """Compare completions.

        Raises:
            DataError: a completion is not one that its table allows.
        """
        gaps, forced, uncertain = [], 0, 0
        for request, generation in drawn:
            branching = np.diff(request.table.legal_sets(generation.token_ids.tolist())[1]) > 1
            gaps.append(np.abs(reference_logprobs(self.model, request, generation) - generation.logprobs)[branching])
            forced += int((~branching).sum())
            uncertain += int((generation.logprobs[~branching] != 0).sum())
        return Checked(gap=mismatch_of(np.concatenate(gaps)), forced=forced, uncertain=uncertain, dtype=self.dtype)


def mismatch_of(gaps: np.ndarray) -> Mismatch:
    """Mean, 99th percentile and largest of absolute differences."""
    return Mismatch(tokens=len(gaps), mean=float(gaps.mean()), p99=float(np.quantile(gaps, 0.99)), largest=float(gaps.max()))
