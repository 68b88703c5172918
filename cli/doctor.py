"""`entente doctor`: what is installed, what does not fit, and how to repair it."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from cli.options import open_root
from cli.terminal import output_console

_COLOURS = {"problem": "bold red", "warning": "yellow", "ok": "green"}
_COLUMNS = 120
"""Width of the table where there is no terminal."""


def doctor(
    *,
    preset: Annotated[str, Parameter(help="Settings that a run would have.")] = "laptop",
    config: Annotated[list[Path] | None, Parameter(help="TOML files laid over the preset.", negative="")] = None,
    runs_root: Annotated[
        Path, Parameter(help="Folder that runs would go to, or s3://bucket/prefix.", converter=open_root)
    ] = Path("runs"),
    deep: Annotated[
        bool, Parameter(help="Also start a Prefect server and see that it answers (half a minute).", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="Print the findings as one JSON object.", negative="")] = False,
) -> None:
    """Look at this environment and say what would keep a run from working, and the cure; exit code 1 if anything would.

    Examples

        entente doctor

        entente doctor --deep --json
    """
    from cli.checks import as_object, examine, verdict
    from cli.read_environment import boot_prefect, read_environment

    findings = examine(read_environment(runs_root, preset, config or []))
    if deep:
        booted = boot_prefect()
        findings = [booted, *findings] if booted.state == "problem" else [*findings, booted]
    if json:
        print(jsonlib.dumps(as_object(findings)))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(f"[{_COLOURS[finding.state]}]{finding.state}[/]", finding.name, _text(finding.sentence, finding.cure))
        output_console(_COLUMNS).print(table)
        if not deep:
            print("not checked: whether a Prefect server starts (use --deep)")
        print(verdict(findings))
    if any(finding.state == "problem" for finding in findings):
        raise SystemExit(1)


def _text(sentence: str, cure: str) -> str:
    from rich.markup import escape

    return escape(sentence) + (f"\n→ {escape(cure)}" if cure else "")
