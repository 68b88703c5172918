"""One smoke test: selects the device, runs each stage in a separate process, and writes settings and results.

A repeated test keeps the results of stages that it skips.

    python -m benchmarks.smoke.smoke_test JOB      runs one stage (entente/telemetry/child.py)
"""

import asyncio
import importlib
import re
import shlex
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.smoke.job import STAGES, Device, Job, Stage, StageFailed, StageResult, chosen_stages, figures_so_far
from benchmarks.smoke.recommend import as_toml, base_preset, model_advice, recommend
from entente.settings.layers import preset_names
from entente.telemetry.cards import Card, check_visible, take_cards, visible_cards
from entente.telemetry.child import ChildResult, answer_job, in_a_sentence, last_lines, run_child
from entente.telemetry.errors import InputError
from entente.telemetry.machine import apply_threads, environment, usable_cores
from entente.telemetry.progress import reporter
from storage.files import durable_write
from storage.json_files import write_json

FOLDER = "_smoke"
Child = Callable[..., Awaitable[ChildResult]]


def plan_job(device: Literal["auto", "cpu", "cuda"], model: str, runs_root: Path, nvml: Any = None) -> tuple[Job, Card | None]:
    """The job of a test on this machine, and its card; `nvml` replaces the module `pynvml`. Raises InputError if there is no card
    for 'cuda', or a variable names a card that does not exist."""
    if device != "cpu":
        check_visible(nvml)
    cards = visible_cards(nvml) if device != "cpu" else ()
    if device == "cuda" and not cards:
        raise InputError("--device is 'cuda' but no card is visible here: look at `nvidia-smi`, or take --device cpu")
    card = cards[0] if cards else None
    chosen: Device = "cuda" if card else "cpu"
    name = re.sub(r"[^a-z0-9.]+", "-", f"{card.name if card else 'cpu'}-{model}".lower()).strip("-")
    if model != "tiny" and Path(model).is_dir():
        model = str(Path(model).resolve())
    return Job(device=chosen, model=model, folder=(runs_root / FOLDER / name).resolve()), card


def smoke_test(job: Job, card: Card | None, *, only: Sequence[str] = (), run: Child = run_child) -> dict[str, Any]:
    """Run the stages, or `card` and those in `only`; writes results and settings to the job's folder, and returns the results."""
    stages, facts = chosen_stages(only), environment()
    if card is not None:
        take_cards((card,))
        facts |= {"card": card.name, "uuid": card.uuid, "driver": card.driver}
    results = asyncio.run(_run_stages(job, stages, run))
    figures, device = figures_so_far(job), card.name if card else "CPU"
    advice = [*model_advice(job), *recommend(job.device, figures)]
    preset = as_toml(advice, f"recommended by `entente smoke` on {device}, model {job.model}")
    base, file = base_preset(preset_names(), figures.get("card", {}), job.device), job.folder / "preset.toml"
    outcome = {
        "device": device,
        "passed": all(result.passed for result in results),
        "stages": [asdict(result) for result in results],
        "facts": facts,
        "command": f"entente train --preset {base} --config {shlex.quote(str(file))}",
        "results": str(job.folder / "smoke.json"),
    }
    durable_write(file, preset.encode())
    write_json(job.folder / "smoke.json", outcome)
    return outcome


async def _run_stages(job: Job, stages: Sequence[Stage], run: Child) -> list[StageResult]:
    """The results of `stages`. If the first stage, `card`, fails, skips the others."""
    results: list[StageResult] = []
    for number, stage in enumerate(stages, 1):
        if results and not results[0].passed:
            result = StageResult(stage=stage.name, passed=False, sentence="not run, because the stage 'card' failed")
        else:
            reporter().say(f"{number} of {len(stages)}, {stage.name} ...")
            result = await _run_stage(job, stage, run)
            write_json(job.result(stage.name), asdict(result))
        results.append(result)
        reporter().say(f"{number} of {len(stages)}, {stage.name}: {'passed' if result.passed else 'FAILED'}: {result.sentence}")
        reporter().stage("smoke", number, len(stages))
    return results


async def _run_stage(job: Job, stage: Stage, run: Child) -> StageResult:
    """Run the process of a stage, at most for its time limit; always returns a result."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    log = job.result(stage.name).with_suffix(".log")
    child = await run(
        "benchmarks.smoke.smoke_test", job.as_object() | {"stage": stage.name}, log, limit_s=stage.limit_s, environment=hidden
    )
    if child.answer is None:
        return StageResult(
            stage=stage.name, passed=False, sentence=child.why, advice=stage.advice, seconds=child.seconds, log=child.log
        )
    result = StageResult(stage=stage.name, seconds=child.seconds, **child.answer)
    return result if result.passed else replace(result, advice=result.advice or stage.advice, log=last_lines(log))


def run_stage(job: dict[str, Any]) -> dict[str, Any]:
    """Run a stage in this process. Returns failures of any kind as results."""
    apply_threads(usable_cores())
    (stage,) = (stage for stage in STAGES if stage.name == job["stage"])
    try:
        module = importlib.import_module(f"benchmarks.smoke.{stage.module}_stages")
        output = getattr(module, stage.name.replace("-", "_"))(Job.from_object(job))
    except StageFailed as error:
        return {"passed": False, "sentence": str(error), "advice": error.advice}
    except Exception as error:
        traceback.print_exc()
        return {"passed": False, "sentence": in_a_sentence(error)}
    return {"passed": True} | asdict(output)


if __name__ == "__main__":
    answer_job(run_stage)
