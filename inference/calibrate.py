"""What LoRA slots cost on this machine: a few interleaved passes with and without an adapter, before the engine is ready.

On a GPU slots cost little and hold several versions; on a CPU every token gathers its adapter's weights, ten times the base's
cost. Merged weights are an alternative in float32 only, where they lose nothing.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.model_files import eos_token_id
from inference.served import LoadedVersion
from inference.settings import InferenceSettings
from inference.warm_up import throwaway_request
from records.generation import GenerationRequest
from records.policy_version import BASE, PolicyVersion
from telemetry.progress import reporter

if TYPE_CHECKING:
    from inference.vllm_engine import VllmEngine

DEAR = 1.5
"""Times the base's seconds from which slots are dear."""
_PASSES, _REQUESTS, _PROMPT, _COMPLETION = 3, 16, 128, 16


_measured: dict[tuple[str, int], bool] = {}
"""By model and slot rank, for as long as the process lives: an engine that is built again need not measure again."""


def known_to_be_dear(model: Path, settings: InferenceSettings) -> bool:
    """Whether slots were measured in this process already, and found dear."""
    return not _measured.get((str(model), settings.adapter_rank), True)


async def slots_are_cheap(engine: "VllmEngine", model: Path, settings: InferenceSettings) -> bool:
    """Whether `engine`, started with slots, should keep them; says what it measured.

    Without an alternative (weights that are not float32) nothing is measured.
    """
    if settings.dtype != "float32":
        reporter().say(f"adapters: slots, because merged weights in {settings.dtype} would lose small updates to rounding")
        return True
    place = (str(model), settings.adapter_rank)
    if place in _measured:
        return _measured[place]
    folder = Path(tempfile.mkdtemp(prefix="entente-calibration-"))
    try:
        noise = write_noise(folder, model, settings.adapter_rank)
        adapter = LoadedVersion(policy=PolicyVersion(version=-1, adapter_hash="", adapter=noise), slot=1)
        await engine.load(adapter)
        ratio = await _ratio(engine, adapter, eos_token_id(model))
    finally:
        shutil.rmtree(folder)
    cheap = _measured[place] = ratio < DEAR
    chosen = "slots" if cheap else "merge_reload"
    reporter().say(f"adapters: {chosen}, because slots take {ratio:.1f} times the base model's time here (bound {DEAR:g})")
    return cheap


async def _ratio(engine: "VllmEngine", adapter: LoadedVersion, eos_id: int) -> float:
    """Median seconds of a batch under `adapter` over that of the base, in interleaved passes; the first is not counted."""
    base = LoadedVersion(policy=BASE)
    seconds: dict[int, list[float]] = {base.slot: [], adapter.slot: []}
    for number in range(_PASSES + 1):
        for served in (base, adapter):
            began = time.perf_counter()
            await asyncio.gather(*(engine.draw(request, served) for request in _batch(eos_id, number, served.slot)))
            seconds[served.slot].append(time.perf_counter() - began)
    return statistics.median(seconds[1][1:]) / statistics.median(seconds[0][1:])


def _batch(eos_id: int, number: int, slot: int) -> list[GenerationRequest]:
    """Requests whose prompts share nothing with any other batch's."""
    return [
        throwaway_request(
            f"calibration/{number}/{slot}/{each}", eos_id, prompt=_PROMPT, tokens=_COMPLETION, first=number * _REQUESTS + each
        )
        for each in range(_REQUESTS)
    ]


def write_noise(folder: Path, model: Path, rank: int, spread: float = 1e-3) -> Path:
    """An adapter of random weights, N(0, spread), on every linear layer of the model's blocks, in peft's layout; its folder."""
    import torch
    from safetensors.torch import save_file

    from inference.adapter_check import CONFIG_FILE, WEIGHTS_FILE, linear_shapes

    shapes, layers = linear_shapes(model)
    tensors = {}
    for layer in range(layers):
        for kind, (out_features, in_features) in shapes.items():
            part = "self_attn" if kind in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{kind}"
            tensors[f"{name}.lora_A.weight"] = spread * torch.randn(rank, in_features)
            tensors[f"{name}.lora_B.weight"] = spread * torch.randn(out_features, rank)
    save_file(tensors, folder / WEIGHTS_FILE)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shapes), "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(described | {"base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"}))
    return folder
