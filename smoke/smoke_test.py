"""One smoke test from its device to its page, its settings file and its JSON object."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.run_settings import preset_names
from smoke.job import SHAPES, Device, Job, StageResult, chosen_stages
from smoke.page import html_of, verdict
from smoke.recommend import Advice, as_toml, attention_remark, base_preset, recommend
from smoke.run_stages import Command, figures_in_force, run_stages, stage_command
from storage.runs import durable_write
from telemetry.cards import Card, check_visible, take_cards, visible_cards
from telemetry.errors import InputError
from telemetry.machine import environment

FOLDER = "_smoke"
"""Folder beside the runs; a test lies below it, in a folder named after its card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """A finished test."""

    device: str
    """Name of the card, or "CPU"."""
    results: list[StageResult]
    folder: Path
    preset: str
    """The recommended settings as TOML."""
    command: str
    """The command line that trains with them."""

    @property
    def passed(self) -> bool:
        """Whether every stage passed."""
        return all(result.passed for result in self.results)

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / "smoke.html"

    def as_object(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "device": self.device,
            "passed": self.passed,
            "verdict": verdict(self.results),
            "stages": [result.as_object() for result in self.results],
            "preset": self.preset,
            "command": self.command,
            "page": str(self.page),
        }


def plan_job(
    device: Literal["auto", "cpu", "cuda"], model: str, shape: str, runs_root: Path, nvml: Any = None
) -> tuple[Job, Card | None]:
    """What a test would be told here, and its card.

    Args:
        model: folder or hub id; empty: a model is made.
        shape: one of SHAPES; empty: 'tiny' on a CPU, 'qwen2.5-7b' on a card.
        nvml: the module `pynvml`, or a stand-in.

    Raises:
        InputError: there is no card for 'cuda', a variable names a card that does not exist, or model and shape are both given.
    """
    if device != "cpu":
        check_visible(nvml)
    cards = visible_cards(nvml) if device != "cpu" else ()
    if device == "cuda" and not cards:
        raise InputError("--device is 'cuda' but no card is visible here: look at `nvidia-smi`, or take --device cpu")
    if model and shape:
        raise InputError("--model and --shape exclude each other: a shape is only for a model that the test makes")
    if shape and shape not in SHAPES:
        raise InputError(f"there is no shape '{shape}': --shape takes {', '.join(SHAPES)}")
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())
    card = cards[0] if cards else None
    chosen: Device = "cuda" if card else "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-") if card else "cpu"
    default = "" if model else "qwen2.5-7b" if card else "tiny"
    folder = (runs_root / FOLDER / name).resolve()
    return Job(device=chosen, model=model, shape=shape or default or "tiny", folder=folder), card


def smoke_test(
    job: Job,
    card: Card | None,
    *,
    only: Sequence[str] = (),
    again: bool = False,
    limit_s: float = 0.0,
    command: Command = stage_command,
) -> SmokeTest:
    """Run the stages and write page, settings and result into the job's folder.

    Args:
        only: names of stages; none: all.
        again, limit_s, command: see `run_stages`.

    Raises:
        InputError: `only` names no stage.
    """
    stages = chosen_stages(only)
    facts: dict[str, Any] = environment()
    if card is not None:
        take_cards((card,))
        facts |= {"card": card.name, "uuid": card.uuid, "driver": card.driver}
    results = run_stages(job, stages, facts, again=again, limit_s=limit_s, command=command)
    found = figures_in_force(job, facts)
    device = card.name if card else "CPU"
    remarks = [f"Recommended by `entente smoke` on: {device}, model: {job.model or job.shape}", attention_remark(found)]
    model = Advice(name="inference.model", value=job.model or SHAPES[job.shape], reason="the other settings depend on its size")
    preset = as_toml([model, *recommend(job.device, found)], [remark for remark in remarks if remark])
    base = base_preset(preset_names(), found.get("card", {}), job.device)
    test = SmokeTest(
        device=device,
        results=results,
        folder=job.folder,
        preset=preset,
        command=f"entente train --preset {base} --config {shlex.quote(str(job.preset))}",
    )
    durable_write(job.preset, preset.encode())
    durable_write(test.page, html_of(device, results, preset, test.command, facts).encode())
    durable_write(job.folder / "smoke.json", json.dumps(test.as_object(), indent=1).encode())
    return test
