"""The policy under training: a frozen base with a LoRA adapter, and its probabilities over legal sets.

log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        (the masked policy; z: logits, T: temperature of the row)
"""

import errno
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from telemetry.errors import InputError
from training.padded_rows import PaddedRows
from training.settings import TrainingSettings

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLogprobs:
    """What one forward says of the branching tokens; all [branching tokens], float32."""

    chosen: Tensor
    """Log-probability, nats, of the drawn token over its legal set; carries the gradient."""
    legal: Tensor
    """[branching tokens, largest legal set]: log-probability of every legal token in the order of the row's legal ids, -inf
    beyond them; carries the gradient."""
    entropy: Tensor
    """Entropy of the policy over the legal set, nats; detached."""
    legal_mass: Tensor
    """Probability that the unmasked model puts on the legal set; detached."""


def choose_device(wanted: str) -> torch.device:
    """The device that `wanted` ('auto', 'cpu', 'cuda') means on this machine.

    Raises:
        InputError: 'cuda' without a GPU.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("training.device is 'cuda' but torch sees no GPU here: set training.device to 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


class Policy:
    """Base model plus adapter on one device."""

    def __init__(self, model: Path, settings: TrainingSettings) -> None:
        self.device = choose_device(settings.device)
        torch.manual_seed(settings.seed)
        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
        config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # peft divides; a float is as good
            lora_dropout=0.0,  # any dropout would make the ratio differ from 1 on-policy
            target_modules=list(LORA_MODULES),
            task_type="CAUSAL_LM",
            # Left null, some servers look the base up on a hub at load time.
            base_model_name_or_path=str(model),
        )
        self.model: PeftModel = get_peft_model(base, config, autocast_adapter_dtype=True)  # type: ignore[assignment]
        self.model.to(self.device)
        # Evaluation mode: with dropout 0 the forward is the same, and nothing may ever make it differ.
        self.model.eval()

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's weights, in a fixed order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def masked_logprobs(self, rows: PaddedRows) -> MaskedLogprobs:
        """One padded forward; the head is applied at branching positions only, and the softmax taken in float32."""
        causal: Any = self.model.base_model.model
        hidden = causal.model(
            input_ids=torch.from_numpy(rows.input_ids).to(self.device),
            attention_mask=torch.from_numpy(rows.attention_mask).to(self.device),
            use_cache=False,
        ).last_hidden_state
        at = hidden[
            torch.from_numpy(rows.token_row).to(self.device),
            torch.from_numpy(rows.token_position).to(self.device),
        ]
        logits = causal.lm_head(at).float() / torch.from_numpy(rows.temperature).to(self.device)[:, None]
        legal = torch.gather(logits, 1, torch.from_numpy(rows.legal_ids).to(self.device))
        legal = legal.masked_fill(~torch.from_numpy(rows.legal_mask).to(self.device), float("-inf"))
        logprobs = torch.log_softmax(legal, dim=1)
        chosen = torch.gather(logprobs, 1, torch.from_numpy(rows.chosen).to(self.device)[:, None])[:, 0]
        with torch.no_grad():
            finite = torch.where(torch.isfinite(logprobs), logprobs, torch.zeros_like(logprobs))
            entropy = -(logprobs.exp() * finite).sum(dim=1)
            mass = torch.exp(torch.logsumexp(legal, dim=1) - torch.logsumexp(logits, dim=1))
        return MaskedLogprobs(chosen=chosen, legal=logprobs, entropy=entropy, legal_mass=mass)

    def memory_metrics(self) -> dict[str, float]:
        """The most memory that this process had so far, and on a GPU that tensors took since this was asked last."""
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks = {"memory/trainer_peak_mib": kib / (2**20 if sys.platform == "darwin" else 2**10)}
        if self.device.type == "cuda":
            peaks["memory/trainer_gpu_peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            torch.cuda.reset_peak_memory_stats(self.device)
        return peaks

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's layout.

        Raises:
            OSError: it cannot be written, such as to a full disk.
        """
        try:
            self.model.save_pretrained(str(folder), save_embedding_layers=False)
        except SafetensorError as error:
            full = "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(folder)) from error
        # peft writes a set in the order that this process gives it; the same adapter must have the same bytes.
        file = folder / "adapter_config.json"
        config = json.loads(file.read_bytes())
        config["target_modules"] = sorted(config["target_modules"])
        file.write_text(json.dumps(config, indent=2, sort_keys=True))

    def load_adapter(self, folder: Path) -> None:
        """Take the adapter's weights from `folder`, as `save_adapter` wrote them."""
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device=str(self.device)))
