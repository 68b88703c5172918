"""What LoRA slots cost on this machine, cause by cause: requests, engines and a process for all of it."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from inference.memory_plan import check_memory, plan_memory, this_machine
from pipeline.plans.find_model import TINY, check_length, model_shape
from pipeline.plans.plan_tuning import settings_for
from pipeline.run_settings import MODEL_FOLDER, RunSettings
from pipeline.threads import apply_threads
from pipeline.tuning_folder import recorded_rows
from storage.runs import RunPaths
from telemetry.errors import EngineError
from telemetry.progress import reporter
from tuning.lora_arms import ARMS, engines
from tuning.process import last_lines, run_program, what_happened
from tuning.requests import as_table, check_shape, random_rows
from tuning.settings import TuneSettings

_WITHIN_S = 3600.0


async def lora_costs(
    run: str, settings: RunSettings | None, runs_root: Path, *, requests: int, rounds: int, log: Path
) -> dict[str, Any]:
    """Each cause with its ratio, and what it was taken on.

    Raises:
        InputError: no such run, or memory that does not do.
        EngineError: its process ended before it was done.
    """
    run, settings = settings_for(run, settings, runs_root)
    base, machine = settings.inference, this_machine()
    on_gpu, rank = machine.gpu_total > 0, settings.training.lora_rank
    shape = model_shape(base.model, settings.tiny_model, settings.prompts)
    check_length(base, shape, base.model)
    wanted = engines(base, rank, on_gpu=on_gpu)
    for each in wanted.values():
        check_memory(shape, each, machine=machine)
    needed = 0 if shape is None else sum(plan_memory(shape, each, machine).needed for each in wanted.values())
    tuning = TuneSettings(requests=requests, concurrency=(1,), random_completion_tokens=16)
    if not run:
        check_shape(tuning, max_model_length=base.max_model_length)
    apply_threads(max(settings.threads))
    model = _model(settings)
    rows = (
        recorded_rows(RunPaths(runs_root / run), requests, max_model_length=base.max_model_length)
        if run
        else random_rows(model, tuning, max_model_length=base.max_model_length)
    )
    with tempfile.TemporaryDirectory(prefix="entente-tuning-") as scratch:
        file = Path(scratch) / "requests.arrow"
        table = as_table(rows)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        job = {
            "model": str(model),
            "requests": str(file),
            "engines": {name: each.model_dump(mode="json") for name, each in wanted.items()},
            "adapter_rank": rank,
            "rounds": rounds,
            "on_gpu": on_gpu,
            "together": not on_gpu and needed < machine.memory,
        }
        arms = sum(arm.engine in wanted for arm in ARMS)
        reporter().say(f"{arms} arms on {len(wanted)} engines, {rounds} rounds of {len(rows)} requests each, and a warm-up")
        start_s = base.start_timeout_s * len(wanted)

        def told(word: dict[str, Any]) -> None:
            if "round" in word:
                reporter().stage("rounds", word["round"], rounds)

        heard = await run_program("tuning.lora_tax", job, log, start_s=start_s, timeout_s=_WITHIN_S, told=told)
    if "costs" not in heard.last or heard.code:
        state, reason = what_happened(heard, start_s=start_s, timeout_s=_WITHIN_S)
        raise EngineError(f"the engines {state}: {reason}; the log ends: {' / '.join(last_lines(log).splitlines()[-3:])}")
    return {
        "run": run,
        "requests": len(rows),
        "rounds": rounds,
        "adapter_rank": rank,
        "seconds_are": heard.last["clock"],
        "costs": heard.last["costs"],
        "seconds": heard.last["seconds"],
    }


def _model(settings: RunSettings) -> Path:
    if settings.inference.model != TINY:
        from decoding.model_files import resolve_model

        return resolve_model(settings.inference.model)
    from training.tiny_model import make_tiny_model

    def told(stage: str, done: int, total: int) -> None:
        reporter().stage(f"tiny model: {stage}", done, total)

    root = settings.runs_root / MODEL_FOLDER
    return make_tiny_model(root, settings.tiny_model, told, settings.prompts).resolve()
