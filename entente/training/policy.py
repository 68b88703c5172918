"""The trained policy: a frozen base model with a LoRA adapter."""

import json
import os
import random
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from entente.decoding.architectures import architecture_of, read_architecture
from entente.decoding.model_files import longest_position
from entente.decoding.open_set import open_sets
from entente.decoding.weight_files import load_whole
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from entente.telemetry.errors import DataError, InputError
from entente.training.fused_layers import fuse_layers
from entente.training.masked_logprobs import Reference, TokenFigures, masked_logprobs, reference_of
from entente.training.micro_batches import MicroBatch
from entente.training.packed_attention import use_packed_attention
from entente.training.settings import CARD_SHARE, TrainingSettings
from storage.files import write_measured
from storage.gather import Batch


def choose_device(wanted: str) -> torch.device:
    """Raises InputError for 'cuda' without a GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("training.device is 'cuda' but torch sees no GPU here: set training.device to 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def leave_room(device: torch.device) -> None:
    """Limit torch's memory on `device`, cache included, to the share in `CARD_SHARE`.

    So the trainer runs out of memory, which it can handle with smaller micro-batches, and not a restarting engine."""
    share = float(os.environ.get(CARD_SHARE, "0"))
    if share and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCopy:
    """On the host; training does not change it."""

    weights: dict[str, torch.Tensor]
    config: bytes


def write_adapter(folder: Path, adapter: AdapterCopy) -> dict[str, dict[str, int | str]]:
    """In peft's layout; returns size and SHA-256 of each file."""
    content = {ADAPTER_CONFIG: adapter.config, ADAPTER_WEIGHTS: tensor_bytes(adapter.weights, metadata={"format": "pt"})}
    return {name: write_measured(folder / name, each) for name, each in content.items()}


class Policy:
    def __init__(self, model: Path | PreTrainedModel, settings: TrainingSettings, *, fsdp: bool = False) -> None:
        """Load the base and wrap it in the adapter; peft wraps a loaded model in place.

        Args:
            fsdp: shard the base over the default group.

        Raises:
            InputError: no GPU for 'cuda' or for 'flex', an unknown family, or blocks without the layers of
                `training.lora_targets`.
        """
        self.device = choose_device(settings.device)
        if settings.attention == "flex" and self.device.type == "cpu":
            raise InputError(
                "training.attention is 'flex', which has a gradient on a GPU only, and the trainer computes on the CPU: set "
                "training.attention to 'ranges'"
            )
        leave_room(self.device)
        self._settings = settings
        # All generators whose state a checkpoint holds, so that equal steps give equal checkpoints.
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        np.random.seed(settings.seed)
        base: Any = model
        if isinstance(model, PreTrainedModel):
            targets = architecture_of(model.config.to_dict(), type(model).__name__).targets(settings.lora_targets)
        else:
            targets = read_architecture(model).targets(settings.lora_targets)
            base = load_whole(AutoModelForCausalLM.from_pretrained, model, dtype=getattr(torch, settings.dtype))
        self._config = config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # peft only divides it, so a float works
            lora_dropout=0.0,  # with dropout the on-policy ratio would differ from 1
            target_modules=list(targets),
            task_type="CAUSAL_LM",
        )
        self.model: PeftModel = get_peft_model(base, config, autocast_adapter_dtype=True)  # type: ignore[assignment]
        fuse_layers(self.model)
        use_packed_attention(self.model.config, settings.attention)
        if fsdp:
            self._split_base()
        self.model.to(self.device)
        self.model.eval()
        self.recompute(settings.gradient_checkpointing)

    def _split_base(self) -> None:
        """Shard each block's frozen weights (FSDP2); a block is gathered while it is used.

        Adapter, embedding and head stay whole: the packed forward reads single head rows, and `parallel` sums adapter gradients.
        """
        processes = init_device_mesh(self.device.type, (dist.get_world_size(),))
        causal: Any = self.model.base_model.model
        whole = {weight for weight in causal.parameters() if weight.requires_grad}
        for block in causal.model.layers:
            fully_shard(block, mesh=processes, ignored_params=whole)
        in_blocks = {weight for block in causal.model.layers for weight in block.parameters()}
        # The backbone itself has no weights to split; as the root it lets one block be gathered while another computes.
        fully_shard(causal.model, mesh=processes, ignored_params=({*causal.model.parameters()} - in_blocks) | whole)

    def parameters(self) -> list[torch.nn.Parameter]:
        """In a fixed order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def masked_logprobs(self, micro: MicroBatch, reference: Reference | None = None) -> TokenFigures:
        with self._autocast():
            return masked_logprobs(
                self.model.base_model.model,
                micro,
                reference,
                entropy_gradient=self._settings.entropy_weight > 0,
                mass_gradient=self._settings.legal_mass_weight > 0,
            )

    def reference(self, micro: MicroBatch) -> Reference:
        with torch.no_grad(), self.model.disable_adapter(), self._autocast():
            return reference_of(self.model.base_model.model, micro)

    @property
    def row_limits(self) -> tuple[int, int]:
        """Vocabulary size, and longest sequence."""
        config: Any = self.model.config
        return config.vocab_size, longest_position(config.to_dict())

    def recompute(self, on: bool) -> None:
        """Activation recomputation: keep only each block's input."""
        if not on:
            self.model.gradient_checkpointing_disable()
            self.model.eval()
            return
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers recomputes only in training mode. That changes nothing else, because dropout is 0.
        self.model.train()

    def _autocast(self) -> AbstractContextManager[Any]:
        """With a bfloat16 base, the adapter computes in bfloat16 from its float32 weights."""
        if self._settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def memory_metrics(self) -> dict[str, float]:
        """MiB: peak of this process so far, and on a GPU the peak of tensors since the last call."""
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks = {"memory/trainer_peak_mib": kib / (2**20 if sys.platform == "darwin" else 2**10)}
        if self.device.type == "cuda":
            peaks["memory/trainer_gpu_peak_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            torch.cuda.reset_peak_memory_stats(self.device)
        return peaks

    def save_adapter(self, folder: Path) -> None:
        """In peft's layout; raises OSError, for example if the disk is full."""
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, self.copy_adapter())

    def copy_adapter(self) -> "AdapterCopy":
        weights = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        config = {name: sorted(value) if isinstance(value, set) else value for name, value in self._config.to_dict().items()}
        # The sorted set: peft's order differs between processes, and equal adapters must have equal bytes. The path of the base
        # would make the hash depend on the machine. It must not be null: some servers then look the base up on a hub.
        config |= {"base_model_name_or_path": "", "inference_mode": True}
        return AdapterCopy(
            weights={name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()},
            config=json.dumps(config, indent=2, sort_keys=True).encode(),
        )

    def load_adapter(self, folder: Path) -> None:
        """Raises DataError if a file is damaged or does not fit this adapter; then nothing changes."""
        file = folder / ADAPTER_WEIGHTS
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"adapter file '{file}' is not a complete safetensors file ({error})") from error
        own = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in own.items()}:
            raise DataError(f"adapter file '{file}' holds other weights than a policy of rank {self._settings.lora_rank} has")
        set_peft_model_state_dict(self.model, weights)


def find_faults(batch: Batch, vocabulary: int, longest: int) -> dict[int, str]:
    """Rows that this run cannot train on, and why: the model's limits (`longest`: tokens) or a user's reward."""
    lengths, positions = np.diff(batch.input_offsets), np.diff(batch.completion_offsets)
    row_of_position = np.repeat(np.arange(len(lengths)), positions)
    ids, legal = batch.input_ids, batch.legal_ids
    foreign = (legal >= vocabulary) | (legal < -vocabulary)
    ends = batch.legal_offsets[:-1][open_sets(legal, batch.legal_offsets)] + 1  # an open set holds ids below its end
    foreign[ends] = legal[ends] > vocabulary
    row_of_legal = np.repeat(row_of_position, np.diff(batch.legal_offsets))

    def rows_of(owner: np.ndarray, bad: np.ndarray) -> np.ndarray:
        return np.bincount(owner[bad], minlength=len(lengths)) > 0

    beyond = rows_of(np.repeat(np.arange(len(lengths)), lengths), (ids < 0) | (ids >= vocabulary)) | rows_of(
        row_of_legal, foreign
    )
    checks = {
        f"it is longer than the {longest} tokens that the model reads": lengths > longest,
        f"it holds token ids beyond the model's vocabulary of {vocabulary}": beyond,
        "a behaviour log-probability is not a finite number": rows_of(row_of_position, ~np.isfinite(batch.behaviour_logprobs)),
        "its return is not a finite number": ~np.isfinite(batch.returns),
    }
    return {row: why for why, bad in reversed(checks.items()) for row in np.flatnonzero(bad).tolist()}
