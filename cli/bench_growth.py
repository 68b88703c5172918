"""`entente bench growth`: how costs grow, as one table and one plot."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from cli.bench import Seed
from cli.bench_dry_run import check_growth, plannable
from cli.options import AsJson
from cli.settings_from_flags import ConfigFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.growth.bench import GrowthOutcome
    from reports.growth import Growth


@plannable("20 minutes", check_growth)
def growth(
    *,
    only: Annotated[list[str] | None, Parameter(help="steps, rows, forks, powers or horizon; default: all.")] = None,
    quick: Annotated[
        bool, Parameter(help="Smaller sizes: 200 steps, a million rows, 16 forks, two years. A few minutes.", negative="")
    ] = False,
    plot: Annotated[Path | None, Parameter(help="File for the plot: .png or .svg.")] = None,
    config: ConfigFiles = None,
    runs_root: Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")] = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """How costs grow with steps, rows, forks, powers and horizon: a table, exponents, a plot. Takes about 20 minutes.

    An exponent of 1 is linear growth, a larger one is faster. Trains 2,000 short steps with a Prefect database of its own.

    Examples

        entente bench growth --plot growth.png --json

        entente bench growth --only steps --only rows --quick
    """
    from benchmarks.growth.bench import check_wanted
    from cli.screen import progress_shown

    wanted = check_wanted(only or ())
    if plot is not None:
        from reports.growth_plot import check_plot

        check_plot(plot)
    from cli.bench_setting import cache_of, run_settings
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.growth.bench import Inputs, bench_growth

    settings = run_settings(config, runs_root=runs_root.absolute(), seed=seed)
    inputs = Inputs(
        settings=settings,
        arguments=[word for file in config or () for word in ("--config", str(Path(file).absolute()))],
        cache=lambda: cache_of(settings),
    )
    with progress_shown():
        outcome = bench_growth(inputs, only=wanted, quick=quick)
    if plot is not None:
        from reports.growth_plot import growth_plot

        plot.write_bytes(growth_plot(outcome.growths, plot.suffix))
    Console().print(growth_table(outcome.growths))
    _show_targets(outcome)
    if json:
        print(jsonlib.dumps(outcome.as_object()))


def growth_table(growths: "Sequence[Growth]") -> Table:
    """A block for each axis: a line of its sizes, then a line for each figure with its values and its exponent."""
    columns = max(len(growth.points) for growth in growths)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(columns + 1):
        table.add_column(justify="right", no_wrap=True)
    for growth in growths:
        sizes, slopes = sorted(growth.points), growth.exponents()
        padding = [""] * (columns - len(sizes))
        table.add_row(growth.axis, *(f"{size:,}" for size in sizes), *padding, "exponent", style="bold")
        for figure, words in growth.figures.items():
            values = [growth.points[size].get(figure) for size in sizes]
            cells = ["" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values]
            table.add_row(words, *cells, *padding, f"{slopes[figure]:.2f}" if figure in slopes else "")
        table.add_section()
    return table


def _show_targets(outcome: "GrowthOutcome") -> None:
    """Say the growth of memory, and whether its target holds."""
    for name, value in outcome.metrics.items():
        if name.startswith("memory_growth"):
            target = outcome.targets.get(name)
            verdict = "" if target is None else ", at most 100: holds" if target.holds(value) else ", at most 100: missed"
            Console().print(f"{name} {value:,.1f}{verdict}", markup=False, highlight=False)
