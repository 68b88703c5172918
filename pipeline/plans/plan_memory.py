"""The parts of a dry run that say how much memory each process needs, and what the adapter changes."""

import os
from typing import Any

from inference.memory_plan import SERVER_PROCESS_BYTES, Machine, ModelShape, plan_memory
from inference.settings import InferenceSettings
from training.settings import TrainingSettings


def memory_forecast(
    shape: ModelShape | None,
    settings: InferenceSettings,
    machine: Machine,
    trainer: int,
    trainer_gpu: int = 0,
    *,
    flow: bool = True,
) -> dict[str, Any]:
    """Resident memory by process.

    Args:
        flow: the command runs a flow, which starts a Prefect server if there is none.
    """
    if shape is None:
        return {"needed": "unknown: the model is not here yet, or its config has no shape", "available_bytes": machine.memory}
    server = 0 if os.environ.get("PREFECT_API_URL") or not flow else SERVER_PROCESS_BYTES
    if settings.urls:
        rows: dict[str, Any] = {"trainer_bytes_about": trainer, "prefect_server_bytes_about": server}
        return rows | {"available_bytes": machine.memory}
    plan = plan_memory(shape, settings, machine, trainer=trainer)
    rows = {
        "engine_process_bytes_about": plan.process,
        "weights_bytes": plan.weights,
        "kv_cache_bytes": plan.kv_cache,
        "kv_cache_tokens": plan.tokens,
        "kv_token_bytes": plan.token,
        "longest_sequences_held": plan.whole_sequences,
        "max_sequences": settings.max_sequences,
        "kv_bytes_for_all_sequences": plan.token * plan.sequence * settings.max_sequences,
    }
    if trainer:
        rows["trainer_process_bytes_about"] = trainer
    if server:
        rows["prefect_server_bytes_about"] = server
    rows |= {"needed_bytes_about": plan.needed + server, "available_bytes": machine.memory}
    if machine.gpu_total:
        rows |= {"gpu_reserved_bytes": plan.gpu_needed, "gpu_free_bytes": machine.gpu_free, "gpu_total_bytes": machine.gpu_total}
    if machine.trainer_gpu[1]:
        rows["gpu_trainer_bytes_at_least"] = trainer_gpu
    if machine.trainer_total:
        rows |= {"trainer_gpu_free_bytes": machine.trainer_free, "trainer_gpu_total_bytes": machine.trainer_total}
    return rows


def adapter_forecast(training: TrainingSettings, shape: ModelShape | None) -> dict[str, Any]:
    """Rank and linear layers of the adapter that is trained."""
    if shape is None:
        return {"rank": training.lora_rank, "targets": ", ".join(training.lora_targets) or "all that the model offers"}
    return {
        "rank": training.lora_rank,
        "targets": ", ".join(shape.targets(training.lora_targets)),
        "parameters": shape.lora_parameters(training.lora_rank, training.lora_targets),
    }
