"""Measures the cost of LoRA slots on this machine: interleaved passes with and without an adapter, before the engine is ready.

On a GPU slots cost little. On a CPU every token gathers its adapter's weights, which makes a pass about ten times slower.
Merged weights are an alternative in float32 only, where merging loses nothing.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.architectures import read_architecture
from decoding.model_files import eos_token_id
from inference.served import LoadedVersion
from inference.settings import InferenceSettings
from inference.warm_up import throwaway_request
from records.generation import GenerationRequest
from records.policy_version import BASE, PolicyVersion
from telemetry.progress import reporter

if TYPE_CHECKING:
    from inference.vllm_engine import VllmEngine

MAX_COST_RATIO = 1.5
"""Slots are used if a pass with an adapter takes less than this many times the base model's time."""
_PASSES, _REQUESTS, _PROMPT, _COMPLETION = 3, 16, 128, 16
_slots_cheap: dict[tuple[str, int], bool] = {}
"""Results of this process by model and slot rank; a restarted engine does not measure again."""


def slots_known_expensive(model: Path, settings: InferenceSettings) -> bool:
    """Whether this process has measured slots and found them too slow."""
    return not _slots_cheap.get((str(model), settings.adapter_rank), True)


async def slots_are_cheap(engine: "VllmEngine", model: Path, settings: InferenceSettings) -> bool:
    """Whether `engine`, started with slots, should keep them. Weights other than float32 keep them without a measurement."""
    if settings.dtype != "float32":
        reporter().say(f"adapters: slots, because merged weights in {settings.dtype} would lose small updates to rounding")
        return True
    key = (str(model), settings.adapter_rank)
    if key in _slots_cheap:
        return _slots_cheap[key]
    folder = Path(tempfile.mkdtemp(prefix="entente-calibration-"))
    try:
        write_random_adapter(folder, model, settings.adapter_rank)
        adapter = LoadedVersion(policy=PolicyVersion(version=-1, adapter_hash="", adapter=folder), slot=1)
        await engine.load(adapter)
        ratio = await _ratio(engine, adapter, eos_token_id(model))
    finally:
        shutil.rmtree(folder)
    cheap = _slots_cheap[key] = ratio < MAX_COST_RATIO
    chosen = "slots" if cheap else "merge_reload"
    reporter().say(
        f"adapters: {chosen}, because slots take {ratio:.1f} times the base model's time here (bound {MAX_COST_RATIO:g})"
    )
    return cheap


async def _ratio(engine: "VllmEngine", adapter: LoadedVersion, eos_id: int) -> float:
    """Median time of a batch with `adapter` over that of the base model. The first pass of each is not counted."""
    base = LoadedVersion(policy=BASE)
    seconds: dict[int, list[float]] = {base.slot: [], adapter.slot: []}
    for number in range(_PASSES + 1):
        for served in (base, adapter):
            began = time.perf_counter()
            await asyncio.gather(*(engine.draw(request, served) for request in _make_batch(eos_id, number, served.slot)))
            seconds[served.slot].append(time.perf_counter() - began)
    return statistics.median(seconds[1][1:]) / statistics.median(seconds[0][1:])


def _make_batch(eos_id: int, number: int, slot: int) -> list[GenerationRequest]:
    """Requests whose first tokens differ, so that no prefix is cached."""
    return [
        throwaway_request(
            f"calibration/{number}/{slot}/{each}", eos_id, prompt=_PROMPT, tokens=_COMPLETION, first=number * _REQUESTS + each
        )
        for each in range(_REQUESTS)
    ]


def write_random_adapter(folder: Path, model: Path, rank: int, spread: float = 1e-3) -> Path:
    """Write a peft adapter with weights from N(0, spread) on all LoRA targets of the model's family; return `folder`."""
    import torch
    from safetensors.torch import save_file

    from inference.adapter_check import CONFIG_FILE, WEIGHTS_FILE

    architecture, tensors = read_architecture(model), {}
    for path, (out_features, in_features) in architecture.linear_layers().items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = spread * torch.randn(rank, in_features)
        tensors[f"base_model.model.{path}.lora_B.weight"] = spread * torch.randn(out_features, rank)
    save_file(tensors, folder / WEIGHTS_FILE)
    targets = sorted(architecture.targets())
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(described | {"base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"}))
    return folder
