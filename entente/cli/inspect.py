"""`entente runs inspect`: one decision or one group of forks of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from entente.cli.options import Run, RunsRoot, which_run
from entente.cli.terminal import cell, output_console
from entente.settings.find_model import model_of
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from storage.files import write_output
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from entente.decoding.thinking import Thought
    from entente.reports.inspect_rows import Decided, Inspector

app = App(name="inspect", help="Inspect one decision or one group of forks of a run.")
Picture = Annotated[Path | None, Parameter(help="SVG file to write the board and its orders to.")]


@app.command
def decision(
    decision_id: Annotated[int, Parameter(help="Id of the decision, from the column decision_id.")],
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    board: Picture = None,
) -> None:
    """Show one decision: prompt, reasoning if any, orders and their probabilities, tokens and the sizes of their legal sets.

    Example

        entente runs inspect decision 8561340446102613373 --run mine --board board.svg
    """
    run = which_run(run, runs_root)
    decided = _opened(run, runs_root).decision(decision_id)
    _write_board(decided, board)
    prompt = _text(decided.prompt)
    prompt.stylize("dim")
    thought, answer = _thought(decided.thought), _text(decided.answer)
    _print(_title(decided), _outcome(decided), prompt, *thought, answer, _orders(decided), _tokens(decided))


@app.command
def group(
    start_group: Annotated[int, Parameter(help="Number of the start group, from the column start_group.")],
    *,
    run: Run = LATEST,
    power: Annotated[str | None, Parameter(help="Power to show; default: where the returns differ most.")] = None,
    phase: Annotated[str | None, Parameter(help="Phase, such as S1902M; default: where the returns differ most.")] = None,
    runs_root: RunsRoot = Path("runs"),
    board: Picture = None,
) -> None:
    """Show one advantage group: its forks by return, and the best and worst fork side by side. The board shows the best fork.

    Examples

        entente runs inspect group 12 --run mine

        entente runs inspect group 12 --run mine --power france --phase S1902M --board best.svg
    """
    from entente.evaluation.intervals import format_count

    run = which_run(run, runs_root)
    pair = _opened(run, runs_root).group(start_group, power, phase)
    _write_board(pair.best, board)
    facts = pair.facts
    usable = "usable" if facts["usable"] else "not usable"
    head = Text(f"start group {start_group} of {facts['producer']}: {facts['power']} in {facts['phase']}", style="bold")
    forks, steps = format_count(facts["n"], "forks"), format_count(facts["used"], "steps")
    summary = f"{forks}, returns {facts['return_range']:.3g} apart, {usable}, trained on by {steps}"
    table = Table("fork", "return", "version", "status", "decision", box=None)
    for member in pair.members:
        values = (member["fork"], f"{member['return']:+.3g}", member["policy_version"], member["status"], member["decision_id"])
        table.add_row(*map(str, values))
    sides = [
        Group(Text(f"{name}: fork {side.facts['fork']}", style="bold"), _outcome(side), *_thought(side.thought), _orders(side))
        for name, side in (("best", pair.best), ("worst", pair.worst))
    ]
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(*sides)
    _print(head, Text(summary), table, side_by_side)


def _opened(run: str, runs_root: Path) -> "Inspector":
    from entente.reports.inspect_rows import Inspector

    paths = RunPaths(runs_root / run)
    settings = settings_of(paths)
    return Inspector(paths, model_of(settings, runs_root, run), settings)  # another tokenizer would show other text


def _write_board(decision: "Decided", file: Path | None) -> None:
    if file is not None:
        picture = decision.picture()
        try:
            write_output(file, picture.encode())
        except OSError as error:
            raise InputError(f"'{file}' cannot be written: {error.strerror}") from error


def _title(decision: "Decided") -> Text:
    facts = decision.facts
    where = f"fork {facts['fork']} of start group {facts['start_group']}, phase {facts['phase_index']}"
    return Text(f"{facts['power']} in {facts['phase']}, {where}, by policy version {facts['policy_version']}", style="bold")


def _outcome(decision: "Decided") -> Text:
    facts = decision.facts
    parts = ", ".join(f"{name} {value:+.3g}" for name, value in decision.components.items() if value)
    steps = f"trained on in step {', '.join(map(str, decision.steps))}" if decision.steps else "not trained on"
    reason = f" ({facts['reason']})" if facts["reason"] else ""
    return Text(f"{facts['status']}{reason}, return {facts['return']:+.3g}; {parts or 'all components 0'}; {steps}")


def _orders(decision: "Decided") -> RenderableType:
    table = Table("order", "probability", "result", box=None)
    for order, probability in decision.orders:
        table.add_row(Text(order), "" if probability is None else f"{probability:.1%}", Text(decision.result(order) or "-"))
    return table


def _thought(thought: "Thought | None") -> list[Text]:
    if thought is None:
        return []
    head = Text(thought.sentence, style="bold")
    if not thought.text:
        return [head]
    text = _text(thought.text)
    text.stylize("italic")
    return [head, text]


def _text(text: str) -> Text:
    return cell(text, keep="\n")


def _tokens(decision: "Decided") -> RenderableType:
    table = Table("position", "token", "legal tokens", "logprob", box=None)
    for place, sampled in enumerate(decision.sampled):
        forced = sampled.legal == 1
        legal = "thought: any" if sampled.legal is None else str(sampled.legal)
        logprob = "forced" if forced else f"{sampled.logprob:.4f}"
        table.add_row(str(place), Text(repr(sampled.token)), legal, logprob, style="dim" if forced else "")
    return table


def _print(*parts: RenderableType) -> None:
    console = output_console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
