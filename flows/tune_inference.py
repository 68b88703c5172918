"""Flow: measure candidates for the engine's settings one after another, choose within constraints, and write the choice.

Each candidate is a task with its own process. Measurements are stored, so a flow that is started again measures only the rest.
"""

import asyncio
import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow

from flows.given_parameters import check_given, check_inside
from flows.open_run import prepare_model
from flows.run_names import tuning_name
from pipeline.cancel_on_sigterm import cancelled_by_sigterm
from pipeline.plans.plan_tuning import TUNING_FOLDER, TuningPlan, identity_of, plan_tuning
from pipeline.settings_form import SettingsParameter
from pipeline.threads import apply_threads
from pipeline.tuning_folder import claim_folder, read_result, recorded_rows, write_result
from reports.tuning_plot import Point, tuning_plot
from storage.run_roots import RunsFolder
from storage.runs import RunPaths, durable_write, held
from tasks.artifacts import show_page, show_table
from tasks.tuning import measure_candidate
from telemetry.errors import InputError
from telemetry.progress import reporter
from tuning.candidates import Candidate
from tuning.choose import Choice, choose, confirmed
from tuning.job import Job, Measured
from tuning.outputs import before_after, figures_of, sweep_files, table_rows, tuned_toml
from tuning.requests import AskedRow, random_rows
from tuning.settings import TuneSettings


@flow(name="tune-inference", flow_run_name=tuning_name)
async def tune_inference(
    run: str = "",
    settings: SettingsParameter | None = None,
    tuning: TuneSettings | None = None,
    runs_root: RunsFolder = Path("runs"),
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure, choose and write. Stored measurements are reused.

    Args:
        run: Run whose requests are repeated and whose adapter is served; "newest" for the one that trained last; empty for random
            requests.
        settings: Settings to start from; default: those of the run, or the laptop preset.
        tuning: Values to try, and the constraints.
        runs_root: Folder of all runs and tuning results.
        output: Folder of the results; default: one named after the run.

    Raises:
        InputError: no such run, requests that do not fit, no candidate that fits, or a folder of other results.
    """
    check_given(runs_root, settings=settings, runs=[run])
    check_inside(output, runs_root / TUNING_FOLDER, "output")
    tuning = tuning or TuneSettings()
    plan = plan_tuning(run, settings, tuning, runs_root, output)
    apply_threads(max(plan.settings.threads))
    with ExitStack() as stack:
        stack.enter_context(cancelled_by_sigterm())
        if not stack.enter_context(held(plan.folder / ".lock")):
            raise InputError(f"another process tunes into '{plan.folder}': wait for it, or give another --output")
        model = await prepare_model(plan.settings)
        requests = claim_folder(plan.folder, identity_of(plan, model, tuning), partial(_rows, plan, model, tuning))
        await _measure_missing(plan, tuning, model, requests)
        found = {each.key: measured for each in plan.candidates if (measured := read_result(plan.folder, each)) is not None}
        choice = await _confirmed(choose(plan.candidates, found, tuning), plan, tuning, model, requests)
        return await _conclude(plan, tuning, choice, found)


def _rows(plan: TuningPlan, model: Path, tuning: TuneSettings) -> list[AskedRow]:
    longest = plan.settings.inference.max_model_length
    if not plan.run:
        return random_rows(model, tuning, max_model_length=longest)
    rows = recorded_rows(RunPaths(plan.settings.runs_root / plan.run), tuning.asked, max_model_length=longest)
    if len(rows) < tuning.asked:
        reporter().say(f"run '{plan.run}' has {len(rows)} decisions, fewer than the {tuning.asked} requests")
    return rows


async def _measure_missing(plan: TuningPlan, tuning: TuneSettings, model: Path, requests: Path) -> None:
    for candidate in plan.candidates:
        if candidate.key in plan.refused:
            write_result(plan.folder, candidate, Measured(state="refused", reason=plan.refused[candidate.key], arms={}))
    missing = plan.missing(retry_failed=tuning.retry_failed)
    if before := len(plan.candidates) - len(plan.refused) - len(missing):
        reporter().say(f"{before} candidates were measured before; {len(missing)} are left")
    began = time.monotonic()
    if missing:
        reporter().say(f"{len(missing)} candidates take about {_time(plan.seconds_each() * len(missing))}")
    for done, candidate in enumerate(missing):
        reporter().stage("measuring candidates", done, len(missing))
        label, timeout_s = candidate.label(plan.varied), tuning.candidate_timeout_s
        job = _job(plan, tuning, model, requests, candidate)
        measured = await measure_candidate(label, plan.folder, candidate, job, timeout_s)
        left = (time.monotonic() - began) / (done + 1) * (len(missing) - done - 1)
        rest = f"; about {_time(left)} left" if left else ""
        reporter().say(f"{done + 1} of {len(missing)}  {label}: {_outcome(measured)}{rest}")
    if missing:
        reporter().stage("measuring candidates", len(missing), len(missing))


def _job(plan: TuningPlan, tuning: TuneSettings, model: Path, requests: Path, candidate: Candidate) -> Job:
    return Job(
        model=model,
        settings=candidate.settings,
        requests=requests.resolve(),
        policy=plan.adapter,
        adapter_rank=plan.adapter_rank,
        concurrency=candidate.concurrency,
        request_rate=candidate.request_rate,
        rounds=tuning.rounds,
        seed=tuning.seed,
    )


def _outcome(measured: Measured) -> str:
    if not measured.arms:
        return f"{measured.state}: {measured.reason}"
    on, off = measured.arms["on"], measured.arms["off"]
    return (
        f"{on.decisions_per_s:,.1f} decisions/s with the adapter ({off.decisions_per_s:,.1f} without), "
        f"P99 {on.e2el_ms_p99:,.0f} ms, hits {on.cache_hit:.0%}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


async def _confirmed(choice: Choice, plan: TuningPlan, tuning: TuneSettings, model: Path, requests: Path) -> Choice:
    """The choice after current and chosen settings were measured again, one directly after the other."""
    chosen, current = choice.chosen, plan.candidates[0]
    if chosen is None or chosen.current or not tuning.confirm:
        return choice
    again = []
    for candidate in (current, chosen):
        name = f"{candidate.key}-beside-{chosen.key if candidate.current else current.key}"
        measured = read_result(plan.folder, candidate, name)
        if measured is None:
            label = f"{candidate.label(plan.varied)} again"
            job = _job(plan, tuning, model, requests, candidate)
            measured = await measure_candidate(label, plan.folder, candidate, job, tuning.candidate_timeout_s, name)
            reporter().say(f"again  {candidate.label(plan.varied)}: {_outcome(measured)}")
        again.append(measured)
    return confirmed(choice, again[0], again[1], tuning, current)


async def _conclude(plan: TuningPlan, tuning: TuneSettings, choice: Choice, found: dict[str, Measured]) -> dict[str, Any]:
    """Write the files and show the page. Returns the outcome as plain values."""
    outcome = {
        "folder": str(plan.folder),
        "run": plan.run,
        "why": choice.why,
        "before": figures_of(plan.candidates[0], found, tuning),
        "after": figures_of(choice.chosen, found, tuning),
        "nearest": figures_of(choice.nearest, found, tuning),
        "constraints": {"max_latency_ms": tuning.max_latency_ms, "min_cache_hit": tuning.min_cache_hit},
        "price_per_hour": tuning.price_per_hour,
        "candidates": [figures_of(each, found, tuning) for each in plan.candidates if each.key in found],
        "rows": table_rows(plan.candidates, found, tuning, plan.varied, choice.chosen.key if choice.chosen else ""),
    }
    await asyncio.to_thread(_write, plan, tuning, choice, found, outcome)
    name = plan.folder.name
    await show_table(f"tuning-{name}", f"{name}: candidates, those with most decisions a second first", outcome["rows"])
    await show_page(f"tuned-{name}", f"{name}: {choice.why}", partial(result_text, outcome))
    return outcome


def _write(plan: TuningPlan, tuning: TuneSettings, choice: Choice, found: dict[str, Measured], outcome: dict[str, Any]) -> None:
    toml = plan.folder / "tuned.toml"
    if choice.chosen is None:
        toml.unlink(missing_ok=True)
        outcome["toml"] = ""
    else:
        on = found[choice.chosen.key].arms["on"]
        remarks = [
            f"entente train --config {toml}",
            f"{on.decisions_per_s:.1f} decisions a second with the adapter on, P99 {on.e2el_ms_p99:.0f} ms, on the machine where "
            f"it was measured; {choice.why}.",
        ]
        durable_write(toml, tuned_toml(choice.chosen, on_gpu=plan.on_gpu, remarks=remarks).encode())
        outcome["toml"] = str(toml)
    for name, records in sweep_files(plan.candidates, tuning).items():
        durable_write(plan.folder / f"vllm-bench-sweep-{name}.json", json.dumps(records, indent=1).encode())
    points = [_point(each, found[each.key], choice) for each in plan.candidates if each.key in found and found[each.key].arms]
    if points:
        durable_write(plan.folder / "throughput.svg", tuning_plot(points, max_latency_ms=tuning.max_latency_ms).encode())
    durable_write(plan.folder / "outcome.json", json.dumps(outcome, indent=1).encode())


def _point(candidate: Candidate, measured: Measured, choice: Choice) -> Point:
    on, off = measured.arms["on"], measured.arms["off"]
    return Point(
        on=(on.e2el_ms_p99, on.decisions_per_s),
        off=(off.e2el_ms_p99, off.decisions_per_s),
        current=candidate.current,
        chosen=candidate is choice.chosen,
    )


def result_text(outcome: dict[str, Any]) -> str:
    """The outcome as the markdown of Prefect's page."""
    lines = [f"# {outcome['why']}", "", f"Everything lies in `{outcome['folder']}`."]
    after = outcome["after"]
    if after is not None:
        toml = Path(outcome["toml"]).read_text()
        lines += ["", "```toml", toml, "```"]
        if outcome["before"] and "on" in outcome["before"]:
            lines += ["", "Before and after, with the adapter on:", "", "```", *before_after(outcome["before"], after), "```"]
    return "\n".join(lines)
