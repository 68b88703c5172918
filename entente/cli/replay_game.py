"""`entente replay`: step through a game of a run in a browser."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from entente.cli.options import AT_LEAST_1, OpenPage, Run, RunsRoot, which_run
from entente.cli.terminal import output_console, show_page
from entente.settings.find_model import model_or_none
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from storage.runs import LATEST, RunPaths


def replay(
    game: Annotated[
        str | None,
        Parameter(help="START_GROUP/FORK, latest, best, worst, or the id of one of its decisions; omitted: list the games."),
    ] = None,
    /,
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    output: Annotated[Path | None, Parameter(help="Page to write; default: replay-GAME.html in the run's folder.")] = None,
    last: Annotated[int, Parameter(help="Number of games to list, newest last, if none is named.", validator=AT_LEAST_1)] = 20,
    open: OpenPage = False,
) -> None:
    """Step through a game of a run: boards, all orders with their results, and the probabilities of the policy's orders.

    Writes one self-contained page. Works while the run trains. To replay a training step, use
    `entente runs replay-step`.

    Examples

        entente replay --run mine

        entente replay latest --run mine --open

        entente replay 12/3 --run mine --output game.html
    """
    from entente.reports.inspect_rows import Inspector
    from entente.reports.replay_page import replay_html
    from entente.reports.replayed import read_game
    from entente.reports.write_page import write_page

    if game is None and (output or open):
        raise InputError("--output and --open are for the page of one game: name the game, such as latest")
    run = which_run(run, runs_root)
    paths = RunPaths(runs_root / run)
    settings = settings_of(paths)
    if game is None:
        _list(paths, last)
        return
    model = model_or_none(settings, runs_root, run)  # boards need no tokenizer; the page says what is missing
    replayed = read_game(Inspector(paths, model, settings), game)
    if replayed.game.lacking:
        sys.stderr.write(f"{replayed.game.lacking}\n")
    default = paths.root / f"replay-{replayed.game.name.replace('/', '-')}.html"
    show_page(write_page(output, default, replay_html(replayed, runs_root), "replay"), open=open)


def _list(paths: RunPaths, last: int) -> None:
    from entente.evaluation.intervals import format_count
    from entente.reports.games import games_to_replay
    from entente.reports.write_page import of_run
    from storage.run_sql import connect, left_out

    with connect(paths.root) as connection:
        games, lacking = games_to_replay(connection, paths.root.name), left_out(connection)
    several = len({game.producer for game in games}) > 1
    table = Table("game", "phases", "policy played", "version", "centres gained", "status", box=None)
    for game in games[-last:]:
        name = game.full_name if several else game.name
        phases = f"{game.first} to {game.last}" if game.phases else "no boards"
        table.add_row(name, phases, ", ".join(game.powers), str(game.version), f"{game.gain:+g}", game.status)
    console = output_console()
    console.print(table)
    count = format_count(len(games), "games")
    console.print(
        f"{count}; replay one: entente replay {games[-1].name} {of_run(paths.root.name, paths.root.parent)}", soft_wrap=True
    )
    if lacking:
        sys.stderr.write(f"{lacking}\n")
