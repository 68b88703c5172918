"""One smoke test: finds its device, runs each stage in a process of its own, and writes settings and results.

A second start reads the results of stages that passed, as long as job, versions and card are the same.

    python -m smoke.smoke_test JOB      runs one stage (telemetry/child.py)
"""

import asyncio
import hashlib
import importlib
import json
import re
import shlex
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.run_settings import preset_names
from pipeline.threads import apply_threads, usable_cores
from smoke.job import MADE, STAGES, Device, Job, Stage, StageFailed, StageResult, chosen_stages, figures_so_far, read_result
from smoke.recommend import Advice, as_toml, base_preset, recommend
from storage.files import durable_write
from telemetry.cards import Card, check_visible, take_cards, visible_cards
from telemetry.child import ChildResult, answer_job, in_a_sentence, last_lines, run_child
from telemetry.errors import InputError
from telemetry.machine import environment
from telemetry.progress import reporter

FOLDER = "_smoke"
"""Folder beside the runs; a test lies below it, in a folder named after its card."""
Child = Callable[..., Awaitable[ChildResult]]


def plan_job(device: Literal["auto", "cpu", "cuda"], model: str, runs_root: Path, nvml: Any = None) -> tuple[Job, Card | None]:
    """What a test would be told here, and its card.

    Args:
        model: one of MADE, or a folder or hub id; empty: tiny on a CPU, qwen2.5-7b on a card.
        nvml: the module `pynvml`, or a stand-in.

    Raises:
        InputError: there is no card for 'cuda', or a variable names a card that does not exist.
    """
    if device != "cpu":
        check_visible(nvml)
    cards = visible_cards(nvml) if device != "cpu" else ()
    if device == "cuda" and not cards:
        raise InputError("--device is 'cuda' but no card is visible here: look at `nvidia-smi`, or take --device cpu")
    card = cards[0] if cards else None
    chosen: Device = "cuda" if card else "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-") if card else "cpu"
    model = model or ("qwen2.5-7b" if card else "tiny")
    if model not in MADE and Path(model).is_dir():
        model = str(Path(model).resolve())
    return Job(device=chosen, model=model, folder=(runs_root / FOLDER / name).resolve()), card


def smoke_test(
    job: Job, card: Card | None, *, only: Sequence[str] = (), again: bool = False, run: Child = run_child
) -> dict[str, Any]:
    """Run the stages and write results and settings into the job's folder. Returns the results as plain values.

    Args:
        only: names of stages; none: all.
        again: repeat stages that have passed.
        run: runs a stage's process.

    Raises:
        InputError: `only` names no stage.
    """
    stages, facts = chosen_stages(only), environment()
    if card is not None:
        take_cards((card,))
        facts |= {"card": card.name, "uuid": card.uuid, "driver": card.driver}
    for stage in STAGES:  # results that hold no longer
        if (before := read_result(job.result(stage.name))) and before.key != _key(stage, job, facts):
            job.result(stage.name).unlink()
    results = asyncio.run(_run_stages(job, stages, facts, again, run))
    found, device = figures_so_far(job), card.name if card else "CPU"
    model = Advice("inference.model", MADE.get(job.model, job.model), "the other settings depend on its size")
    preset = as_toml([model, *recommend(job.device, found)], f"recommended by `entente smoke` on {device}, model {job.model}")
    base, file = base_preset(preset_names(), found.get("card", {}), job.device), job.folder / "preset.toml"
    outcome = {
        "device": device,
        "passed": all(result.passed for result in results),
        "stages": [asdict(result) for result in results],
        "preset": preset,
        "command": f"entente train --preset {base} --config {shlex.quote(str(file))}",
        "page": str(job.folder / "smoke.md"),
    }
    durable_write(file, preset.encode())
    durable_write(job.folder / "smoke.md", as_markdown(outcome, facts).encode())
    durable_write(job.folder / "smoke.json", json.dumps(outcome | {"facts": facts}, indent=1).encode())
    return outcome


async def _run_stages(job: Job, stages: Sequence[Stage], facts: Mapping[str, Any], again: bool, run: Child) -> list[StageResult]:
    """The results of `stages`. Without a card nothing else is begun."""
    job.result("any").parent.mkdir(parents=True, exist_ok=True)
    results: list[StageResult] = []
    for number, stage in enumerate(stages, 1):
        result = None if again else read_result(job.result(stage.name))
        if results and not results[0].passed:
            result = StageResult(stage=stage.name, passed=False, sentence="not run, because the stage 'card' has not passed")
        elif result is None or not result.passed:
            reporter().say(f"{number} of {len(stages)}, {stage.title} ...")
            result = replace(await _run_stage(job, stage, run), key=_key(stage, job, facts))
            durable_write(job.result(stage.name), json.dumps(asdict(result), indent=1).encode())
        results.append(result)
        reporter().say(f"{number} of {len(stages)}, {stage.title}: {'passed' if result.passed else 'FAILED'}: {result.sentence}")
        reporter().stage("smoke", number, len(stages))
    return results


async def _run_stage(job: Job, stage: Stage, run: Child) -> StageResult:
    """Run a stage's process to its end or its limit; however it ends, there is a result."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    log = job.result(stage.name).with_suffix(".log")
    child = await run("smoke.smoke_test", job.as_object() | {"stage": stage.name}, log, limit_s=stage.limit_s, environment=hidden)
    if child.found is None:
        return StageResult(
            stage=stage.name, passed=False, sentence=child.why, advice=stage.advice, seconds=child.seconds, log=child.log
        )
    result = StageResult(stage=stage.name, seconds=child.seconds, **child.found)
    return result if result.passed else replace(result, advice=result.advice or stage.advice, log=last_lines(log))


def run_stage(given: dict[str, Any]) -> dict[str, Any]:
    """Run a stage in this process. A failure of any kind is a result."""
    apply_threads(usable_cores())
    (stage,) = (stage for stage in STAGES if stage.name == given["stage"])
    try:
        module = importlib.import_module(f"smoke.{stage.module}_stages")
        found = getattr(module, stage.name.replace("-", "_"))(Job.from_object(given))
    except StageFailed as error:
        return {"passed": False, "sentence": str(error), "advice": error.advice, "figures": error.figures}
    except Exception as error:
        traceback.print_exc()
        return {"passed": False, "sentence": in_a_sentence(error)}
    return {"passed": True} | asdict(found)


def _key(stage: Stage, job: Job, facts: Mapping[str, Any]) -> str:
    config = Path(job.model) / "config.json"
    written = config.stat().st_mtime if config.is_file() else 0.0  # another model in the same folder is another one
    whole = {"stage": stage.name, "job": job.as_object(), "model": written, "facts": facts}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def as_markdown(outcome: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The results as a page that can be attached to a report."""
    lines = [f"# Smoke test of {outcome['device']}", "", "| stage | result | seconds | |", "|---|---|---|---|"]
    for each in outcome["stages"]:
        words = [each["sentence"], *each["notes"], *([f"try {each['advice']}"] if each["advice"] else [])]
        cells = [each["stage"], "passed" if each["passed"] else "**failed**", f"{each['seconds']:.0f}", "; ".join(words)]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += [
        "",
        f"`{outcome['command']}`",
        "",
        "```toml",
        outcome["preset"].strip(),
        "```",
        "",
        "| figure | value |",
        "|---|---|",
    ]
    lines += [
        f"| {each['stage']} {name} | {value:.6g} |" for each in outcome["stages"] for name, value in each["figures"].items()
    ]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    for each in outcome["stages"]:
        if each["log"]:
            lines += ["", f"The log of {each['stage']} ends:", "", "```", each["log"], "```"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    answer_job(run_stage)
