"""`entente runs losses`: compare losses on the batches of a run."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from cli.dry_run import show_plan
from cli.options import AsJson, DryRun, Run, RunsRoot, which_run
from storage.runs import LATEST
from telemetry.errors import InputError

if TYPE_CHECKING:
    from training.lab import Comparison

_FIGURES = ("masked_share", "effective_sample_share", "gradient_norm", "loss")


def losses(
    *,
    run: Run = LATEST,
    steps: Annotated[int, Parameter(help="Newest recorded steps to look at.", validator=validators.Number(gte=1))] = 3,
    caps: Annotated[
        list[float] | None, Parameter(help="Caps of truncated importance weights.", consume_multiple=True, negative="")
    ] = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Compare losses on batches that a run trained on, at its newest checkpoint, without a new rollout.

    For each loss: the share of masked tokens, the effective share of samples, the norm of its gradient, and the cosine between
    its gradient and that of the run's own loss, as medians over the steps. The run is not changed, and may be training.

    Examples

        entente runs losses --run mine

        entente runs losses --run mine --steps 8 --caps 1 2 5 --json

        entente runs losses --run mine --dry-run             which steps and losses, and about how long
    """
    from pipeline.plans.find_model import model_of
    from pipeline.run_settings import check_objective, settings_of
    from pipeline.threads import apply_threads, usable_cores
    from storage.runs import RunPaths

    caps = [1.0, 2.0, 3.0] if caps is None else caps
    if bad := [cap for cap in caps if not cap > 0]:
        raise InputError(f"a cap of importance weights is above 0, and {bad[0]:g} is not")
    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    settings = settings_of(paths)
    check_objective(settings)
    model = model_of(settings, runs_root, run)
    if dry_run:
        from pipeline.plans.plan_past import plan_lab

        return show_plan(plan_lab(paths, model, settings, steps, caps), json=json)
    apply_threads(usable_cores())
    from cli.screen import progress_shown
    from training.lab import compare

    training = settings.training.model_copy(update={"seed": settings.seed})
    with progress_shown():
        found = compare(paths, model, training, settings.storage, steps, caps)
    _show(found, run)
    if json:
        print(jsonlib.dumps(_facts(found, run)))


def _show(found: "Comparison", run: str) -> None:
    """The comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    names = list(found.tried)
    over = "recorded steps " + ", ".join(map(str, sorted(found.steps)))
    tokens, lag = sum(found.branching_tokens), sum(found.lags) / len(found.lags)
    table = Table(box=None, padding=(0, 2))
    for title in ("loss", "masked", "effective", "gradient", f"cosine to {names[0]}"):
        table.add_column(title, justify="left" if title == "loss" else "right")
    for name in names:
        masked, effective, norm, _ = (found.median(name, figure) for figure in _FIGURES)
        cosine = found.cosines[names[0]][name]
        table.add_row(name, f"{masked:.1%}", f"{effective:.1%}", f"{norm:.3g}", f"{cosine:+.3f}")
    console = Console(highlight=False)
    head = f"run {run} at version {found.version}, {over}: {tokens} branching tokens, {lag:.1f} versions behind on average"
    console.print(head, soft_wrap=True)
    console.print(table)


def _facts(found: "Comparison", run: str) -> dict[str, Any]:
    """The comparison as data; figures are medians over the steps, and by step."""
    from dataclasses import asdict

    return {
        "run": run,
        "version": found.version,
        "steps": list(found.steps),
        "branching_tokens": list(found.branching_tokens),
        "lags": list(found.lags),
        "losses": {
            name: {figure: found.median(name, figure) for figure in _FIGURES} | {"by_step": [asdict(step) for step in tried]}
            for name, tried in found.tried.items()
        },
        # null where a gradient is zero: JSON has no NaN.
        "cosines": {one: {other: c if c == c else None for other, c in row.items()} for one, row in found.cosines.items()},
    }
