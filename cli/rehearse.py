"""`entente runs rehearse`: what past steps would have trained on if another query had chosen their start groups."""

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
    from storage.rehearse import Preferred


def rehearse(
    *,
    selection: Annotated[str, Parameter(help="A query as storage.selection: a file that ends in .sql, or the text itself.")],
    run: Run = LATEST,
    steps: Annotated[int, Parameter(help="Newest steps to look at.", validator=validators.Number(gte=1))] = 20,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Let a query of your own choose for past steps, and compare with what they trained on. The run is not changed.

    Each step chooses among what it could train on then, after what the steps before it used in fact. Per step: start groups that
    it could train on, that it took, that the query takes, that are in both; and mean return, spread and lag of either choice.

    Examples

        entente runs rehearse --run mine --selection mine.sql

        entente runs rehearse --run mine --selection "from candidates select shard, start_group order by spread desc" --json
    """
    from dataclasses import asdict

    from pipeline.run_settings import settings_at
    from storage.ledger import recorded_steps
    from storage.lineages import last_step, lineage_at
    from storage.own_selection import check_selection
    from storage.rehearse import rehearse as look_back
    from storage.runs import RunPaths
    from storage.settings import StorageSettings

    text = StorageSettings(selection=selection).selection
    check_selection(text)
    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    newest = last_step(paths)
    if not recorded_steps(paths, lineage_at(paths, newest)):
        raise InputError(f"run '{run}' has no step yet: a query can be rehearsed on past steps only")
    found = look_back(paths, text, range(max(1, newest - steps + 1), newest + 1), lambda step: settings_at(paths, step).storage)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("step", "could", "took", "query", "both", "return", "by query", "spread", "by query", "lag", "by query"):
        table.add_column(title, justify="right")
    for line in found:
        counts = (line.step, line.candidates, line.in_fact.start_groups, line.by_query.start_groups, line.both)
        pairs = zip(_means(line.in_fact), _means(line.by_query), strict=True)
        table.add_row(*map(str, counts), *(text for pair in pairs for text in pair))
    output_console().print(table)
    if json:
        print(jsonlib.dumps({"run": run, "selection": text, "steps": [asdict(line) for line in found]}))


def _means(found: "Preferred") -> list[str]:
    means = (found.mean_return, found.spread, found.lag)
    return ["" if mean is None else f"{mean:{form}}" for mean, form in zip(means, ("+.3g", ".3g", ".2f"), strict=True)]
