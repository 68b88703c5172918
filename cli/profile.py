"""`entente bench profile`: time by stage of rollouts, of the trainer or of a whole run, compared with a stored profile."""

import json as jsonlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from cli.dry_run import show_plan
from cli.options import AsJson, DryRun
from cli.run_flow import run_flow
from cli.settings_from_flags import ConfigFiles, Preset, SettingsFlags, settings_from
from telemetry.errors import InputError
from telemetry.read_file import LARGEST_RESULT, read_text

if TYPE_CHECKING:
    from flows.profiled_work import Profiled
    from pipeline.run_settings import RunSettings

Kind = Literal["rollout", "trainer", "e2e"]
Steps = Annotated[
    int, Parameter(help="Steps to run; the first is a warm-up and is not counted.", validator=validators.Number(gte=2, lte=1000))
]
Output = Annotated[
    Path | None,
    Parameter(help="JSON file to write, with a flame graph of each thread beside it; default: profile-<what>.json here."),
]
Baseline = Annotated[Path | None, Parameter(help="A stored profile to compare with; exit code 1 if a stage's share grew.")]
Tolerance = Annotated[
    float, Parameter(help="Largest allowed growth of a stage's share of the time.", validator=validators.Number(gt=0, lt=1))
]
_BAR = 24


def profile(
    kind: Annotated[Kind, Parameter(name="WHAT", help="Rollouts alone, the trainer on rows played for it, or the whole flow.")],
    *,
    preset: Preset = "laptop",
    config: ConfigFiles = None,
    steps: Steps = 6,
    output: Output = None,
    baseline: Baseline = None,
    tolerance: Tolerance = 0.05,
    json: AsJson = False,
    dry_run: DryRun = False,
    settings: SettingsFlags = None,
) -> None:
    """Profile rollouts, the trainer or a whole run: time by stage, and a flame graph of each thread.

    Stages of rollouts are engine, board, tokens and rows, by samples of the thread that plays; those of the trainer and of a
    whole run are the ones that `entente runs explain` and the report show.

    Examples

        entente bench profile rollout

        entente bench profile rollout --rollouts.forks-per-group 16 --output before.json

        entente bench profile trainer --training.layout padded --baseline profile-trainer.json --output padded.json

        entente bench profile e2e --baseline profile-e2e.json --tolerance 0.1 --output now.json
    """
    chosen = settings_from(preset, config, settings)
    before = _read(baseline, kind) if baseline is not None else None
    file = output or Path(f"profile-{kind}.json")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder '{file.parent}' for the profile: make it, or choose another --output")
    if dry_run:
        return _show_plan(kind, chosen, steps, file, json=json)
    from flows.profiled_work import short_run_settings
    from reports.profile import as_object, rooms, write_flame_graphs
    from telemetry.machine import environment
    from telemetry.sampling import read_samples, seconds_by_stack

    chosen = short_run_settings(chosen, f"profile-{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", steps)
    with tempfile.TemporaryDirectory(prefix="entente-samples-") as folder:
        done = _measured(kind, chosen, Path(folder))
        sessions = read_samples(Path(folder), done.windows)
    threads = {name: seconds_by_stack(session) for name, session in sessions.items()}
    stages = done.stages or (rooms(threads["engine"]) if "engine" in threads else {})
    pages = write_flame_graphs(sessions, file)
    found = as_object(
        kind,
        stages,
        threads,
        {
            "steps": len(done.windows),
            "flame_graphs": {name: page.name for name, page in pages.items()},
            "settings": chosen.model_dump(mode="json", exclude={"run", "runs_root", "telemetry", "evaluation", "alerts"}),
            "machine": environment(),
        },
    )
    file.write_text(jsonlib.dumps(found, indent=1) + "\n", encoding="utf-8")
    _show(found, before, file)
    if json:
        print(jsonlib.dumps(found))
    if before is not None and _compare(found, before, tolerance, str(baseline)):
        sys.exit(1)


def _show_plan(kind: Kind, settings: "RunSettings", steps: int, file: Path, *, json: bool) -> None:
    """Show what would run and be written: the plan of a training run of these steps, without scores."""
    from flows.open_run import check_inputs
    from pipeline.plans.plan_run import plan_train

    settings = settings.model_copy(update={"run": "", "steps": steps})
    check_inputs(settings)
    plan = plan_train(settings)
    kept = {name: plan[name] for name in ("work", "tokens", "memory", "threads", "engine", "reused_or_made")}
    files = {"profile": str(file), "flame_graphs": str(file.with_name(f"{file.stem}-THREAD.html"))}
    show_plan({"command": f"bench profile {kind}", **kept, "files": files}, json=json)


def _measured(kind: Kind, settings: "RunSettings", folder: Path) -> "Profiled":
    """Do the work in this process and its children, sampled into `folder`. The run's folder is removed afterwards."""
    from cli.prefect_server import prefect_server
    from cli.screen import progress_shown
    from flows import profiled_work
    from flows.open_run import check_inputs
    from telemetry.sampling import VARIABLE

    work = {
        "rollout": profiled_work.profile_rollouts,
        "trainer": profiled_work.profile_trainer,
        "e2e": profiled_work.profile_flow,
    }[kind]
    check_inputs(settings)
    os.environ[VARIABLE] = str(folder)
    try:
        with prefect_server(), progress_shown():
            return run_flow(work(settings))
    finally:
        os.environ.pop(VARIABLE, None)
        shutil.rmtree(settings.paths.root, ignore_errors=True)


def _read(file: Path, kind: Kind) -> dict[str, Any]:
    """Read a stored profile.

    Raises:
        InputError: the file is not a profile, or one of another kind.
    """
    try:
        found = jsonlib.loads(read_text(file, at_most=LARGEST_RESULT, what="baseline"))
        stored, shares = found["profile"], {stage: float(each["share"]) for stage, each in found["stages"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"baseline '{file}' is no stored profile ({error}): make one with `entente bench profile {kind}`"
        ) from error
    if stored != kind or not shares:
        raise InputError(f"baseline '{file}' is a profile of '{stored}', not of '{kind}': give one of the same kind")
    return found


def _show(found: dict[str, Any], before: dict[str, Any] | None, file: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"profile {found['profile']}", no_wrap=True)
    for title in ("seconds", "share", *(["baseline"] if before else [])):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage, each in found["stages"].items():
        old = [f"{before['stages'].get(stage, {'share': 0.0})['share']:.1%}"] if before else []
        bar = f"[cyan]{'█' * round(_BAR * each['share'])}[/]"
        table.add_row(stage, f"{each['seconds']:,.2f}", f"{each['share']:.1%}", *old, bar)
    console = Console(highlight=False)
    console.print(table)
    for name, thread in found["threads"].items():
        hot = next(iter(thread["hottest"]), "nothing")
        waiting = thread["shares"].get("waiting", 0.0)
        console.print(f"thread {name}: {waiting:.0%} waiting, hottest in {hot}", markup=False, soft_wrap=True)
    pages = ", ".join(found["flame_graphs"].values())
    written = f"written to {file}, and the flame graphs {pages}" if pages else f"written to {file}"
    sentence = f"{found['steps']} steps; {written}; sampling itself takes time, so compare shares, not seconds"
    console.print(sentence, markup=False, soft_wrap=True)


def _compare(found: dict[str, Any], before: dict[str, Any], tolerance: float, name: str) -> bool:
    """Print the stages whose share grew. Returns whether any did."""
    from reports.profile import grown

    def parts(profile: dict[str, Any]) -> dict[str, float]:
        return {stage: each["share"] for stage, each in profile["stages"].items()}

    if found["settings"] != before.get("settings"):
        print(f"the settings differ from those of {name}; shares are compared anyway")
    more = grown(parts(found), parts(before), tolerance)
    for growth in more:
        print(f"grew by more than {tolerance:.0%}: {growth.sentence()}")
    if not more:
        print(f"no stage's share grew by more than {tolerance:.0%} over {name}")
    return bool(more)
