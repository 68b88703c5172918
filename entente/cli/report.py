"""`entente report`: the HTML report of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from entente.cli.options import OpenPage, Run, RunsRoot, which_run
from entente.cli.terminal import show_page
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from entente.reports.run_facts import RunFacts


def report(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    output: Annotated[Path | None, Parameter(help="The page to write; default: report.html in the run's folder.")] = None,
    pictures: Annotated[
        Path | None,
        Parameter(help="Also write the learning curve and the first board as SVG files to this folder."),
    ] = None,
    open: OpenPage = False,
) -> None:
    """Write the report of a run as one page: strength, learning curve, health, time, boards with orders, settings.

    Works while the run trains, and for an interrupted run. The page is self-contained.

    Examples

        entente report --run mine

        entente report --run mine --output mine.html --open

        entente report --run mine --pictures docs/pictures
    """
    from entente.reports.page import write_pictures

    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    facts, file = report_run(paths, output)
    show_page(file, open=open)
    if pictures:
        print(*write_pictures(facts, pictures), sep="\n")


def report_run(paths: RunPaths, output: Path | None = None) -> "tuple[RunFacts, Path]":
    from entente.reports.page import Surroundings, html_of
    from entente.reports.run_facts import read_facts
    from entente.reports.write_page import write_page

    facts = read_facts(paths)
    html = html_of(facts, Surroundings(paths=paths))
    return facts, write_page(output, paths.root / "report.html", html, "report")
