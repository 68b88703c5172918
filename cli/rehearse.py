"""`entente runs rehearse`: what past steps would have trained on, or started from, if another query had chosen."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators
from rich.table import Table

from cli.options import AsJson, Run, RunsRoot, which_run
from cli.terminal import output_console
from storage.runs import LATEST
from telemetry.errors import InputError

if TYPE_CHECKING:
    from pipeline.rehearse_positions import RehearsedDraw
    from storage.rehearse import RehearsedStep
    from storage.runs import RunPaths

    _Found = tuple[str, list[list[str]], list[RehearsedStep] | list[RehearsedDraw]]


def rehearse(
    *,
    selection: Annotated[str, Parameter(help="A query as storage.selection: a file that ends in .sql, or its text.")] = "",
    sampling: Annotated[str, Parameter(help="A query as rollouts.sampling, or the name of another sampling.")] = "",
    run: Run = LATEST,
    steps: Annotated[int, Parameter(help="Newest steps to look at.", validator=validators.Number(gte=1))] = 20,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Let a query of your own choose for past steps, and compare with what was chosen. The run is not changed.

    With --selection each step chooses start groups among what it could train on then, after what the steps before it used in
    fact. Per step: start groups that it could train on, that it took, that the query takes, that are in both; and mean return,
    spread and lag of either choice. With --sampling each step draws positions to start from. Per step: positions, those with a
    weight above 0, drawn, drawn by the query, in both; and of either draw the mean year, the policy's centres, and the spread
    that past start groups had there.

    Examples

        entente runs rehearse --run mine --selection mine.sql

        entente runs rehearse --run mine --selection "from candidates select shard, start_group order by spread desc" --json

        entente runs rehearse --run mine --sampling "from positions select snapshot_id, 1 / (1 + start_groups) as weight"
    """
    from dataclasses import asdict

    from storage.ledger import recorded_steps
    from storage.lineages import last_step, lineage_at
    from storage.runs import RunPaths

    if bool(selection) == bool(sampling):
        raise InputError("give one query: --selection for the start groups of a step, or --sampling for the positions")
    text = _checked(selection, sampling)
    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    newest = last_step(paths)
    if not recorded_steps(paths, lineage_at(paths, newest)):
        raise InputError(f"run '{run}' has no step yet: a query can be rehearsed on past steps only")
    look_back = _choose_again if selection else _draw_again
    titles, lines, found = look_back(paths, text, range(max(1, newest - steps + 1), newest + 1))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in titles.split(","):
        table.add_column(title.strip(), justify="right")
    for line in lines:
        table.add_row(*line)
    output_console().print(table)
    if json:
        named = {"selection": text} if selection else {"sampling": text}
        print(jsonlib.dumps({"run": run, **named, "steps": [asdict(step) for step in found]}))


def _checked(selection: str, sampling: str) -> str:
    """The text of the query, which can be run over nothing."""
    from pipeline.own_sampling import check_sampling
    from rollouts.settings import RolloutSettings
    from state_cache.sampling import SAMPLINGS
    from storage.own_selection import check_selection
    from storage.settings import StorageSettings

    if selection:
        check_selection(text := StorageSettings(selection=selection).selection)
    elif (text := RolloutSettings(sampling=sampling).sampling) not in SAMPLINGS:
        check_sampling(text)
    return text


def _choose_again(paths: "RunPaths", text: str, steps: range) -> "_Found":
    from pipeline.run_settings import settings_at
    from storage.rehearse import rehearse as look_back

    found = look_back(paths, text, steps, lambda step: settings_at(paths, step).storage)
    titles = "step, could, took, query, both, return, by query, spread, by query, lag, by query"
    lines = [
        [
            *map(str, (line.step, line.candidates, line.in_fact.start_groups, line.by_query.start_groups, line.both)),
            *_in_turn(line, mean_return="+.3g", spread=".3g", lag=".2f"),
        ]
        for line in found
    ]
    return titles, lines, found


def _draw_again(paths: "RunPaths", text: str, steps: range) -> "_Found":
    from functools import partial

    from pipeline.rehearse_positions import rehearse_positions
    from pipeline.run_settings import settings_at
    from storage.learnable_process import PastReturnsProcess

    storage = settings_at(paths, steps[-1]).storage
    past = PastReturnsProcess(paths, blend=storage.blend, discount=storage.discount)
    try:
        found = rehearse_positions(paths, text, steps, partial(settings_at, paths), past)
    finally:
        past.close()
    titles = "step, positions, possible, drew, query, both, year, by query, centres, by query, spread, by query"
    lines = [
        [
            *map(str, (line.step, line.positions, line.possible, line.in_fact.positions, line.by_query.positions, line.both)),
            *_in_turn(line, year=".1f", centres=".2f", spread=".3g"),
        ]
        for line in found
    ]
    return titles, lines, found


def _in_turn(line: "RehearsedStep | RehearsedDraw", **forms: str) -> list[str]:
    """Each mean in fact and by the query, in its form; empty where there is none."""
    values = [(getattr(choice, name), form) for name, form in forms.items() for choice in (line.in_fact, line.by_query)]
    return ["" if value is None else f"{value:{form}}" for value, form in values]
