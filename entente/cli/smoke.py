"""`entente smoke`: smoke test of a new GPU."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from entente.cli.options import AsJson, RunsRoot
from entente.telemetry.errors import InputError
from storage.files import file_lock


def smoke(
    *,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(help="auto: the first visible GPU, or the CPU if there is none.")
    ] = "auto",
    model: Annotated[str, Parameter(help="'tiny' to make one, or a folder or hub id.")] = "tiny",
    only: Annotated[list[str] | None, Parameter(help="Stages to run; default: all.", negative="")] = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Test every part of a run on this GPU, one after another, and recommend settings; exits with 1 if a stage fails.

    Each stage has a process and a time limit of its own. Results and settings are written to runs/_smoke/, to a folder named
    after GPU and model; the settings combine the stages of all invocations.

    Examples

        entente smoke                                     the first visible GPU, a tiny model; a few minutes

        entente smoke --device cpu --json                 no GPU

        entente smoke --model Qwen/Qwen2.5-7B-Instruct    the model that you will train

        entente smoke --only legal-mask                   rerun one stage
    """
    from benchmarks.smoke.job import chosen_stages
    from benchmarks.smoke.smoke_test import plan_job, smoke_test
    from entente.cli.terminal import print_json, show_progress

    chosen_stages(only or ())  # before a folder is made
    job, card = plan_job(device, model, runs_root)
    with show_progress(), file_lock(job.folder / ".lock") as alone:
        if not alone:
            raise InputError(f"another command tests in '{job.folder}', and would get the jobs of this one: wait for it")
        outcome = smoke_test(job, card, only=only or ())
    _show(outcome)
    if json:
        print_json(outcome)
    if not outcome["passed"]:
        raise SystemExit(1)


def _show(outcome: dict) -> None:
    from rich.table import Table

    from entente.cli.terminal import cell, output_console

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for each in outcome["stages"]:
        more = [f"-> try {each['advice']}"] if each["advice"] else []
        text = "\n".join([each["sentence"], *more])
        state = "[green]passed[/]" if each["passed"] else "[bold red]failed[/]"
        table.add_row(state, each["stage"], f"{each['seconds']:.0f} s", cell(text, keep="\n"))
    output_console(140).print(table)
    for each in outcome["stages"]:
        if each["log"]:
            print("\n".join([f"\nthe log of {each['stage']} ends:", *(f"    {line}" for line in each["log"].splitlines())]))
    print(f"\nresults: {outcome['results']}\nuse the recommended settings: {outcome['command']}")
