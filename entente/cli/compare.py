"""`entente compare`: several runs side by side."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from entente.cli.options import OpenPage, RunsRoot, which_runs
from entente.cli.terminal import cell, output_console, show_page
from entente.telemetry.errors import InputError
from entente.telemetry.progress import shown
from storage.runs import RunPaths

if TYPE_CHECKING:
    from entente.reports.compared import Compared


def compare(
    *names: Annotated[str, Parameter(help="Runs, or patterns such as 'sweep-*'; the others are compared with the first.")],
    runs_root: RunsRoot = Path("runs"),
    output: Annotated[Path | None, Parameter(help="The page to write; default: in the first run's folder.")] = None,
    open: OpenPage = False,
) -> None:
    """Compare runs on one page and in one table: settings, curves, scores on the same positions, cost.

    Scores are paired by position, since all runs are scored from the same ones. A difference is reported only if its 95 %
    interval excludes 0. Works while the runs train. The page is self-contained.

    Examples

        entente compare mine other

        entente compare base 'sweep-*' --output sweep.html --open
    """
    comparison, file = compare_on_page(names, runs_root, output)
    _show(comparison, runs_root)
    show_page(file, open=open)


def compare_on_page(names: Iterable[str], runs_root: Path, output: Path | None = None) -> "tuple[Compared, Path]":
    from entente.reports.compare_page import html_of
    from entente.reports.compared import compare_runs
    from entente.reports.write_page import write_page

    names = [name for words in names for name in words.split(",") if name]
    chosen = which_runs(names, runs_root)
    if len(chosen) == 1 and len(names) > 1:
        raise InputError(f"run '{chosen[0]}' is named {len(names)} times: name another run to compare it with")
    comparison = compare_runs([RunPaths(runs_root / name) for name in chosen])
    default = runs_root / chosen[0] / _page_name(chosen[1:])
    return comparison, write_page(output, default, html_of(comparison, runs_root))


def _page_name(others: list[str]) -> str:
    return f"compare-{others[0]}{f'-and-{len(others) - 1}-more' if len(others) > 1 else ''}.html"


def _show(comparison: "Compared", runs_root: Path) -> None:
    from entente.reports import sentences

    console = output_console()
    console.print(_table(comparison))
    lines = sentences.verdicts(comparison)
    lines += [f"{run.name}: {sentence}" for run in comparison.runs for sentence in run.troubles]
    lines += [f"{reason}: {command}" for reason, command in sentences.next_commands(comparison, runs_root)]
    for sentence in lines:
        console.print(shown(sentence), markup=False, soft_wrap=not console.is_terminal)


def _table(comparison: "Compared") -> Table:
    from entente.evaluation.intervals import format_interval
    from entente.reports.compare_page import score_rows, total_rows
    from entente.reports.read_run import value_text

    names = [run.name for run in comparison.runs]
    table = Table(show_edge=False, pad_edge=False)
    for name in ("", *names):
        table.add_column(cell(name), overflow="fold")
    blocks: dict[str, list[tuple[str, list[str]]]] = {"scores, centres gained": score_rows(comparison)}
    differences: dict[str, list[str]] = {}
    for pair in comparison.paired:
        if not isinstance(pair.comparison, str):
            row = differences.setdefault(pair.label, [""] * len(names))
            text = f"{pair.comparison.difference.mean:+.2f} {format_interval(pair.comparison.difference.interval, '+.2f')}"
            row[names.index(pair.other)] = text + (" shown" if pair.comparison.difference.excludes_zero else "")
    blocks[f"more than {names[0]}, same starts"] = list(differences.items())
    blocks["cost"] = total_rows(comparison.runs)
    blocks["settings that differ"] = [(name, [value_text(value) for value in values]) for name, values in comparison.settings]
    for heading, rows in blocks.items():
        if rows:
            table.add_section()
            table.add_row(cell(heading), style="bold")
            for what, texts in rows:
                table.add_row(cell(f"  {what}"), *map(cell, texts))
    return table
