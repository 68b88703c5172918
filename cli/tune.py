"""`entente bench tune`: which engine settings draw the most decisions here, with the adapter on; and what the adapter costs."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter, validators

from cli.dry_run import show_plan
from cli.options import AsJson, DryRun, which_run
from cli.run_flow import run_flow
from cli.settings_from_flags import ConfigFiles
from cli.terminal import output_console
from telemetry.errors import EngineError, InputError
from tuning.settings import TuneSettings

app = App(name="tune", default_parameter=Parameter(consume_multiple=True))

Run = Annotated[
    str, Parameter(help="Run whose prompts, masks and adapter are measured with; 'latest'; default: random requests.")
]
Preset = Annotated[
    str, Parameter(help="Settings to begin with where no run is named: laptop, gpu-24, gpu-40, gpu-80, gpu-141 or cluster.")
]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs; results lie in _tuning beside them.")]


@app.default
def tune(
    *,
    run: Run = "",
    preset: Preset = "laptop",
    config: ConfigFiles = None,
    output: Annotated[Path | None, Parameter(help="Folder of the results; default: one named after the run.")] = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
    dry_run: DryRun = False,
    tuning: Annotated[TuneSettings | None, Parameter(name="*", help="The grid and the constraints.")] = None,
) -> None:
    """Find the engine settings that draw the most decisions per second within limits of latency and cache hits.

    Each candidate is measured in its own process, with the adapter on and off; today's settings are one of them. Results are
    kept: the same command continues after an interruption, and measures only values that have no result yet.

    Examples

        entente bench tune --run mine                       what the run asks, a few minutes

        entente bench tune --run mine --dry-run             which candidates, and about how long

        entente bench tune --run mine --max-sequences 128 256 512 --max-batched-tokens 4096 8192 16384 --concurrency 128 256

        entente bench tune --run mine --adapters slots merge_reload --block-size 32 64 128 --prefix-caching on off

        entente bench tune --random-prompt-tokens 128 --random-completion-tokens 384 --concurrency 32

        entente bench tune --preset gpu-24 --gpu-memory-share 0.85 0.89 0.93 --adapter-rank 16 32 --price-per-hour 2.5

        entente bench tune --run mine --max-latency-ms 5000 --min-cache-hit 0.5 --json

        entente train --config runs/_tuning/mine/tuned.toml
    """
    tuning = tuning or TuneSettings()
    from pipeline.plans.plan_tuning import describe_plan, plan_tuning

    run = which_run(run, runs_root)
    settings = _settings(run, preset, config, runs_root)
    plan = plan_tuning(run, settings, tuning, runs_root, output)
    if dry_run:
        return show_plan(describe_plan(plan, tuning), json=json)
    from cli.prefect_server import prefect_server
    from cli.screen import progress_shown
    from flows.tune_inference import tune_inference

    try:
        with prefect_server(), progress_shown():
            outcome = run_flow(tune_inference(run, settings, tuning, runs_root, output))
    except BaseException as error:
        if plan.folder.is_dir() and not isinstance(error, InputError):
            sys.stderr.write(f"what is measured is kept in {plan.folder}; the same command goes on there\n")
        raise
    _show(outcome)
    if json:
        print(jsonlib.dumps({name: value for name, value in outcome.items() if name != "rows"}))
    if outcome["after"] is None:
        raise InputError(outcome["why"]) if outcome["nearest"] else EngineError(_nothing_measured(outcome))


@app.command
def lora(
    *,
    run: Run = "",
    preset: Preset = "laptop",
    config: ConfigFiles = None,
    requests: Annotated[int, Parameter(help="Requests of each pass.", validator=validators.Number(gte=8))] = 64,
    rounds: Annotated[int, Parameter(help="Passes of each arm; the median counts.", validator=validators.Number(gte=1))] = 3,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Say what LoRA slots cost here beside merged weights, and which of the two inference.adapters should be.

    Both engines answer the same requests, with an adapter and without. In the table, 2 means twice the time of merged weights.

    Examples

        entente bench tune lora                            random requests

        entente bench tune lora --run mine --rounds 5 --json

        entente bench tune lora --dry-run
    """
    run = which_run(run, runs_root)
    settings = _settings(run, preset, config, runs_root)
    slots = settings.inference.model_copy(update={"adapters": "slots"})
    settings = settings.model_copy(update={"inference": slots})
    tuning = TuneSettings(
        max_sequences=(),
        max_batched_tokens=(),
        adapters=("slots", "merge_reload"),
        concurrency=(min(32, requests // 2),),
        requests=requests,
        rounds=rounds,
        min_cache_hit=0,
        confirm=False,
        random_completion_tokens=16,
    )
    from pipeline.plans.plan_tuning import TUNING_FOLDER, describe_plan, plan_tuning

    folder = runs_root / TUNING_FOLDER / f"{run or 'random'}-lora"
    plan = plan_tuning(run, settings, tuning, runs_root, folder)
    if dry_run:
        return show_plan(describe_plan(plan, tuning) | {"command": "bench tune lora"}, json=json)
    from cli.prefect_server import prefect_server
    from cli.screen import progress_shown
    from flows.tune_inference import tune_inference
    from tuning.outputs import slots_or_merged

    with prefect_server(), progress_shown():
        outcome = run_flow(tune_inference(run, settings, tuning, runs_root, folder))
    rows, advice = slots_or_merged(outcome["candidates"])
    if not rows:
        raise EngineError(_nothing_measured(outcome))
    _show_rows(rows)
    print(f"times: seconds of a decision over those with merged weights; {advice}")
    if json:
        print(jsonlib.dumps({"run": run, "folder": outcome["folder"], "rows": rows, "advice": advice}))


def _settings(run: str, preset: str, config: list[Path] | None, runs_root: Path) -> Any:
    """Settings to begin with: those of the run, or a preset, with files over them."""
    from pipeline.run_settings import layered_settings, resumed_settings

    if run:
        return resumed_settings(config or (), {"run": run, "runs_root": runs_root}, fork=True)
    return layered_settings(preset, config or (), {"runs_root": runs_root})


def _nothing_measured(outcome: dict[str, Any]) -> str:
    first = next((each for each in outcome["candidates"] if each["state"] != "refused"), outcome["candidates"][0])
    log_end = f"; its log ends: {first['log'].splitlines()[-1]}" if first["log"] else ""
    return f"no candidate could be measured; the settings in force: {first['state']}, {first['reason']}{log_end}"


def _show(outcome: dict[str, Any]) -> None:
    from tuning.outputs import before_after

    _show_rows(outcome["rows"])
    print("latencies in ms with the adapter on; ±: how much passes alike differ; off: decisions a second without the adapter")
    for each in outcome["candidates"]:
        if each["log"]:
            print(f"\n{each['key']} {each['state']}; its log ends:")
            print("\n".join(f"    {line}" for line in each["log"].splitlines()))
    if outcome["after"] is not None:
        if outcome["before"] and "on" in outcome["before"]:
            print(f"\n{'before and after':<30} {'in force':>10}    {'chosen':>10}")
            print("\n".join(before_after(outcome["before"], outcome["after"])))
        print(f"\n{outcome['why']}\nuse them: entente train --config {outcome['toml']}")


def _show_rows(rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    left = ("candidate", "note", "served as")
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        table.add_column(heading.strip(), justify="left" if heading in left else "right", no_wrap=heading != "note")
    for row in rows:
        table.add_row(*row.values(), style="bold" if row.get("note") == "chosen" else None)
    output_console(180).print(table)
