"""`entente compare`: several runs side by side."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from entente.cli.options import OpenPage, RunsRoot, which_runs
from entente.cli.terminal import cell, output_console, show_page

if TYPE_CHECKING:
    from rich.table import Table

    from entente.reports.compared import Compared


def compare(
    *names: Annotated[str, Parameter(help="Runs, or patterns such as 'sweep-*'; the others are compared with the first.")],
    runs_root: RunsRoot = Path("runs"),
    output: Annotated[Path | None, Parameter(help="The page to write; default: in the first run's folder.")] = None,
    open: OpenPage = False,
) -> None:
    """Compare runs on one page and in one table: settings, curves, scores on the same positions, cost.

    Scores are compared position by position, as every run is scored from the same ones. A difference is claimed only if its 95 %
    interval excludes 0. Also works while the runs train. The page needs no network and no other file.

    Examples

        entente compare mine other

        entente compare base 'sweep-*' --output sweep.html --open
    """
    found, file = compare_on_page(names, runs_root, output)
    _show(found, runs_root)
    show_page(file, open=open)


def compare_on_page(names: Iterable[str], runs_root: Path, output: Path | None = None) -> "tuple[Compared, Path]":
    """Compare these runs and write the page; the comparison, and the page's file."""
    from entente.reports.compare_page import write_comparison
    from entente.reports.compared import compare_runs
    from storage.runs import RunPaths

    chosen = which_runs(names, runs_root)
    found = compare_runs([RunPaths(runs_root / name) for name in chosen])
    file = output or runs_root / chosen[0] / _page_name(chosen[1:])
    write_comparison(found, file, runs_root)
    return found, file


def _page_name(others: list[str]) -> str:
    return f"compare-{others[0]}{f'-and-{len(others) - 1}-more' if len(others) > 1 else ''}.html"


def _show(found: "Compared", runs_root: Path) -> None:
    """The table, and below it what it means in sentences."""
    from entente.reports import sentences
    from entente.telemetry.progress import shown

    console = output_console()
    console.print(_table(found))
    said = sentences.verdicts(found)
    said += [f"{run.name}: {sentence}" for run in found.runs for sentence in run.troubles]
    said += [f"{reason}: {command}" for reason, command in sentences.next_commands(found, runs_root)]
    for sentence in said:
        console.print(shown(sentence), markup=False, soft_wrap=not console.is_terminal)


def _table(found: "Compared") -> "Table":
    """A block each for scores, their differences, cost and settings; a column for each run."""
    from rich.table import Table

    from entente.evaluation.intervals import format_interval
    from entente.reports.compare_page import score_rows, total_rows
    from entente.reports.read_run import value_text

    names = [run.name for run in found.runs]
    table = Table(show_edge=False, pad_edge=False)
    for name in ("", *names):
        table.add_column(cell(name), overflow="fold")
    blocks: dict[str, list[tuple[str, list[str]]]] = {"scores, centres gained": score_rows(found)}
    differences: dict[str, list[str]] = {}
    for pair in found.paired:
        if not isinstance(pair.found, str):
            row = differences.setdefault(pair.label, [""] * len(names))
            text = f"{pair.found.difference.mean:+.2f} {format_interval(pair.found.difference.interval, '+.2f')}"
            row[names.index(pair.other)] = text + (" shown" if pair.found.shown else "")
    blocks[f"more than {names[0]}, same starts"] = list(differences.items())
    blocks["cost"] = total_rows(found.runs)
    blocks["settings that differ"] = [(name, [value_text(value) for value in values]) for name, values in found.settings]
    for heading, rows in blocks.items():
        if rows:
            table.add_section()
            table.add_row(cell(heading), style="bold")
            for what, texts in rows:
                table.add_row(cell(f"  {what}"), *map(cell, texts))
    return table
