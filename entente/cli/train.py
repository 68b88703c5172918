"""`entente train`: run the training flow from the terminal."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from entente.cli.options import AsJson, ConfigFiles, DryRun, Preset, SettingsFlags, settings_from
from entente.cli.run_flow import run_flow
from entente.cli.terminal import print_json, show_plan
from entente.reports.write_page import of_run
from entente.settings.cache_version import with_cache_version
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.runs import RunPaths


def train(
    *,
    preset: Preset = None,
    config: ConfigFiles = None,
    resume: Annotated[bool, Parameter(help="Continue the run that --run names from its files.", negative="")] = False,
    init_from: Annotated[str, Parameter(help="RUN:STEP: begin a new run from the weights of another run's step.")] = "",
    json: AsJson = False,
    dry_run: DryRun = False,
    settings: SettingsFlags = None,
) -> None:
    """Train a policy: roll out, train, publish, repeat; then report how much better it plays.

    Works without a GPU, a hub or an account: the `laptop` preset makes its own tiny model.

    Examples

        entente train                                  the laptop preset, a few minutes

        entente train --config mine.toml --seed 1 --rollouts.policy-powers all

        entente train --preset gpu-24 --inference.model Qwen/Qwen2.5-1.5B-Instruct

        entente train --run mine --resume              after Ctrl-C, a crash, or a full disk

        entente train --run mine --resume --steps 80   more steps for a run that is done

        entente train --init-from mine:20 --run hot    a new run from step 20 of another

        entente train --steps 500 --dry-run            estimate time, memory and disk without starting
    """
    if init_from and resume:
        raise InputError("--init-from begins a new run: leave out --resume, or --init-from")
    chosen = settings_from(preset, config, settings, resume=resume, init_from=init_from, dry_run=dry_run)
    chosen = with_cache_version(chosen, resume=resume)
    if dry_run:
        from entente.cli.dry_run import plan_train

        return show_plan(plan_train(chosen, resume=resume), json=json)
    _, summary = train_run(chosen, resume=resume)
    for line in _lines(summary, chosen.evaluation.horizon_years):
        print(line)
    if json:
        print_json(summary)


def train_run(chosen: RunSettings, *, resume: bool) -> tuple[RunPaths, dict[str, Any]]:
    from flows.open_run import check_inputs, with_run_name

    check_inputs(chosen, resume=resume)
    from flows.train_policy import train_policy

    chosen = with_run_name(chosen)
    try:
        return chosen.paths, run_flow(lambda: train_policy(chosen, resume=resume))
    except BaseException as error:
        # A new run that has its settings had begun, and was not refused: a bot or an endpoint stopped it.
        if chosen.paths.settings.is_file() and not (resume and isinstance(error, InputError)):
            where = of_run(chosen.run, chosen.runs_root)
            sys.stderr.write(f"finished steps are kept; continue with: entente train {where} --resume\n")
        raise


def _scripted(summary: dict) -> list[str]:
    names = [name.removesuffix("_score") for name in summary if name.endswith("_score")]
    words = {"teacher": "imitated teacher"}
    return [
        f"{words.get(name, f'{name} player')} {summary[f'{name}_score']:+.2f}"
        for name in names
        if name not in ("base", "trained")
    ]


def _lines(summary: dict, years: int) -> list[str]:
    from entente.evaluation.intervals import describe_interval, format_count

    per = "a year" if years == 1 else f"in {years} years"

    def score(name: str) -> str:
        interval = describe_interval(summary[f"{name}_ci"], summary.get("source_games", 0), "+.2f", "source games")
        return f"{summary[f'{name}_score']:+.2f} centres {per}, {interval}"

    run = Path(summary["run"])
    work = (
        f"{format_count(summary['steps'], 'steps')}, {format_count(summary['decisions'], 'decisions')}, "
        f"{summary['wall_s']:.0f} s, orders rejected {summary['orders_rejected']}"
    )
    return [
        work,
        ", ".join(_scripted(summary)),
        f"base score     {score('base')}",
        f"trained score  {score('trained')}",
        f"the run lies in {run}; see it on one page: entente report {of_run(run.name, run.parent)}",
    ]
