"""`entente report`: the page of a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(
    *,
    run: Annotated[str, Parameter(help="Name of the run.")],
    runs_root: Annotated[Path, Parameter(help="Folder of all runs.")] = Path("runs"),
    output: Annotated[Path | None, Parameter(help="The page to write; default: report.html in the run's folder.")] = None,
    pictures: Annotated[Path | None, Parameter(help="Also write curve.svg and board.svg into this folder.")] = None,
    open: Annotated[bool, Parameter(help="Show the page in a browser.", negative="")] = False,
) -> None:
    """Write what a run came to as one page: scores, learning curve, health, time, boards with orders, settings.

    Works while the run trains, and for one that was cut. The page needs no network and no other file.

    Examples

        entente report --run mine

        entente report --run mine --output mine.html --open

        entente report --run mine --pictures docs/pictures
    """
    from flows.run_settings import layered_settings, preset_names
    from reports.page import write_pictures, write_report
    from reports.read_run import read_run
    from storage.runs import RunPaths

    facts = read_run(RunPaths(runs_root / run))
    presets = {name: layered_settings(name).model_dump(mode="json") for name in preset_names()}
    file = output or runs_root / run / "report.html"
    write_report(facts, file, presets, runs_root)
    print(file)
    for picture in write_pictures(facts, pictures) if pictures else []:
        print(picture)
    if open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
