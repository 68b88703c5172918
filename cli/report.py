"""`entente report`: the page of a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli.options import Run, RunsRoot, which_run
from storage.runs import LATEST


def report(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    output: Annotated[Path | None, Parameter(help="The page to write; default: report.html in the run's folder.")] = None,
    pictures: Annotated[
        Path | None,
        Parameter(help="Also write curve, ladder, ratings, board and replay as SVG, those there are, into this folder."),
    ] = None,
    ablation: Annotated[
        Path | None, Parameter(help="A stored result of `entente bench ablation --json`, to be shown beside the run.")
    ] = None,
    open: Annotated[bool, Parameter(help="Show the page in a browser.", negative="")] = False,
) -> None:
    """Write what a run came to as one page: strength, learning curve, health, time, boards with orders, settings.

    Works while the run trains, and for one that was cut. The page needs no network and no other file.

    Examples

        entente report --run mine

        entente report --run mine --output mine.html --open

        entente report --run mine --pictures docs/pictures

        entente report --run mine --ablation ablation.json
    """
    from pipeline.plans.find_model import model_or_none
    from pipeline.run_settings import layered_settings, preset_names, settings_of
    from reports.ablation import read_ablation
    from reports.page import write_pictures, write_report
    from reports.read_run import read_run
    from storage.runs import RunPaths

    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    facts = read_run(paths)
    presets = {name: layered_settings(name).model_dump(mode="json") for name in preset_names()}
    file = output or runs_root / run / "report.html"
    write_report(facts, file, presets, runs_root, read_ablation(ablation) if ablation else None)
    print(file)
    if pictures:
        for picture in write_pictures(facts, pictures, paths, model_or_none(settings_of(paths), runs_root, run)):
            print(picture)
    if open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
