"""Flow: measure candidates for the engine's settings one after another, choose within limits, and write the choice.

Each candidate is a task with its own process. Figures are stored, so a flow that is started again measures only the rest.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.given_parameters import check_given, check_inside, named_after
from flows.open_run import prepare_model
from inference.server_arguments import start_limit_s
from pipeline.cancel_on_sigterm import cancelled_by_sigterm
from pipeline.refresh_settings import newest_run
from pipeline.run_settings import RunSettings, settings_of
from pipeline.threads import apply_threads
from pipeline.tune_engine import (
    TUNING_FOLDER,
    Candidate,
    TuneSettings,
    TuningPlan,
    choose,
    plan_tuning,
    table_rows,
    tuned_toml,
    write_requests,
)
from storage.files import durable_write, held
from storage.json_files import write_json
from storage.runs import RunPaths, resolve_run
from tasks.artifacts import show_table
from telemetry.child import ChildResult, run_child
from telemetry.errors import InputError
from telemetry.progress import reporter


@flow(name="tune-inference", flow_run_name=named_after("tune", "run"))
async def tune_inference(
    run: str = "newest",
    settings: RunSettings | None = None,
    tuning: TuneSettings | None = None,
    runs_root: Path = Path("runs"),
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure, choose and write. Returns the outcome as plain values.

    Args:
        run: Run whose requests are repeated and whose adapter is served; "newest" for the one that trained last.
        settings: Settings to start from; default: those of the run.
        tuning: Values to try, and the limits.
        runs_root: Folder of all runs and tuning results.
        output: Folder of the results; default: one named after the run.

    Raises:
        InputError: there is no such run.
    """
    check_given(runs_root, settings=settings, runs=[run])
    check_inside(output, runs_root / TUNING_FOLDER, "output")
    run = resolve_run(runs_root, newest_run(runs_root) or "latest") if run == "newest" else run
    settings = (settings or settings_of(RunPaths(runs_root / run))).model_copy(update={"runs_root": runs_root})
    plan = plan_tuning(run, settings, tuning or TuneSettings(), output)
    apply_threads(max(plan.settings.threads))
    with ExitStack() as stack:
        stack.enter_context(cancelled_by_sigterm())
        if not stack.enter_context(held(plan.folder / ".lock")):
            raise InputError(f"another process tunes into '{plan.folder}': wait for it, or give another --output")
        model = await prepare_model(plan.settings)
        write_requests(plan)
        failed = await _measure_missing(plan, model)
        found = plan.measured()
        chosen, why = choose(found, plan.tuning)
        outcome = {
            "folder": str(plan.folder),
            "why": why,
            "chosen": {"settings": chosen.values, "figures": found[chosen]} if chosen else None,
            "current": found.get(plan.candidates[0]),
            "failed": {each.label(plan.varied): {"why": child.why, "log": child.log} for each, child in failed.items()},
            "rows": table_rows(plan, found, {each: child.why for each, child in failed.items()}, chosen),
            "toml": _write_toml(plan, chosen, why),
        }
        write_json(plan.folder / "outcome.json", outcome)
        await show_table(f"tuning-{run}", f"{run}: {why}", outcome["rows"])
        return outcome


async def _measure_missing(plan: TuningPlan, model: Path) -> dict[Candidate, ChildResult]:
    """Measure the candidates without figures; returns those that failed."""
    missing = [each for each in plan.candidates if each not in plan.measured()]
    if before := len(plan.candidates) - len(missing):
        reporter().say(f"{before} candidates were measured before; {len(missing)} are left")
    failed = {}
    for done, candidate in enumerate(missing):
        reporter().stage("measuring candidates", done, len(missing))
        child = await measure_candidate(candidate.label(plan.varied), plan, model, candidate)
        if child.found is None:
            failed[candidate] = child
        words = f"{child.found['decisions_per_s']:,.1f} decisions/s" if child.found else f"failed: {child.why}"
        reporter().say(f"{done + 1} of {len(missing)}  {candidate.label(plan.varied)}: {words}")
    reporter().stage("measuring candidates", len(missing), len(missing))
    return failed


@task(
    name="measure-candidate",
    task_run_name="measure-{label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
    tags=["tune"],
)
async def measure_candidate(label: str, plan: TuningPlan, model: Path, candidate: Candidate) -> ChildResult:
    """Measure a candidate in a process of its own, and store its figures."""
    file, job = plan.file(candidate), plan.job(candidate, model)
    limit_s = start_limit_s(candidate.settings) + plan.tuning.timeout_s
    child = await run_child("pipeline.tuning_candidate", job, plan.folder / "logs" / f"{file.stem}.log", limit_s=limit_s)
    if child.found is not None:
        write_json(file, {"settings": candidate.values} | child.found)
    return child


def _write_toml(plan: TuningPlan, chosen: Candidate | None, why: str) -> str:
    """Write the settings file, or remove it if nothing is chosen. Returns its path, or ""."""
    toml = plan.folder / "tuned.toml"
    if chosen is None:
        toml.unlink(missing_ok=True)
        return ""
    remarks = [f"entente train --config {toml}", f"on the machine where it was measured: {why}"]
    durable_write(toml, tuned_toml(chosen, remarks).encode())
    return str(toml)
