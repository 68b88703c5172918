"""`entente runs what-if`: continue a recorded position with other orders, under the same random numbers."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from entente.cli.options import SEED, AsJson, Run, RunsRoot, which_run
from entente.cli.players import Temperature, how_they_play, resolve_players, with_open_players
from entente.game.snapshot import POWERS
from entente.telemetry.errors import InputError
from entente.telemetry.progress import shown
from storage.runs import GAMES_FOLDER, LATEST, RunPaths, check_name

if TYPE_CHECKING:
    from entente.evaluation.contestants import Contestant
    from entente.evaluation.what_if import Continuation, OrderSets, RecordedPosition, WhatIf
    from entente.players.policy import Decider


def what_if(
    *,
    game: Annotated[str, Parameter(help="A run's game (START_GROUP/FORK, latest, best, worst), a played game, or its file.")],
    phase: Annotated[
        str, Parameter(help="The phase with other orders, such as S1902M; default: the first movement phase of the game.")
    ] = "",
    orders: Annotated[
        tuple[str, ...], Parameter(help="Other orders, separated by commas; other units keep theirs.", negative="")
    ] = (),
    version: Annotated[str, Parameter(help="Player of --power in that phase: newest, v20, other:v20, dumbbot+search.")] = "",
    power: Annotated[str, Parameter(help="Power to measure; default: that of --orders, or the one with the most units.")] = "",
    players: Annotated[str, Parameter(help="Players of all seats afterwards; each seat gets one of them at random.")] = "dumbbot",
    forks: Annotated[int, Parameter(help="Number of pairs of forks.", validator=validators.Number(gte=2, lte=4096))] = 64,
    years: Annotated[int, Parameter(help="Length of each fork in game years.", validator=validators.Number(gte=1, lte=20))] = 2,
    seed: Annotated[int, Parameter(help="Seed of all random choices.", validator=SEED)] = 0,
    temperature: Temperature = 1.0,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Continue a recorded position as it was played and with other orders, in pairs of forks with the same random numbers.

    Prints centres at the end and the difference with its 95 % interval. The forks
    of a pair differ only in one phase's orders. Without --orders and --version both replay the game: the difference is 0.

    Examples

        entente runs what-if --game latest --run mine --version newest

        entente runs what-if --game 12/3 --run mine --phase S1902M --orders "A PAR - BUR, A MAR S A PAR - BUR"

        entente runs what-if --game latest --run mine --phase F1901M --power france --version base

        entente runs what-if --game evening --phase S1903M --orders "F BRE - ENG" --forks 256

        entente runs what-if --game best --phase S1902M --power turkey --version newest --players newest --json
    """
    from entente.cli.terminal import print_json, show_progress
    from entente.evaluation.contestants import check_play_is_used
    from entente.evaluation.what_if import Continuation, asked_power, other_orders
    from entente.reports.sentences import describe_change

    if orders and version:
        raise InputError("--orders and --version both set the orders: use one of them")
    position, owner = _position(game, phase, run, runs_root)
    power = power.strip().upper()
    order_texts = [order for text in orders for order in text.replace(";", ",").split(",") if order.strip()]
    changed = other_orders(position, order_texts, power) if orders else None
    power = asked_power(position, power, changed)
    meant, contestants = resolve_players([*([version] if version else []), *_split(players)], owner or run, runs_root)
    check_play_is_used(contestants, how_they_play(temperature, None))
    version = meant.get(version, "")
    how = Continuation(
        forks=forks, years=years, players=tuple(meant[who] for who in _split(players)), seed=seed, temperature=temperature
    )
    with show_progress():
        answer = _ask(position, power, changed, version, how, contestants, runs_root)
    change = describe_change(answer, changed, version)
    _show(answer, change)
    if json:
        print_json(_facts(answer, change, changed, version))


def _split(names: str) -> list[str]:
    players = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not players:
        raise InputError("nobody plays on: set --players, as 'dumbbot'")
    return players


def _position(game: str, phase: str, run: str, runs_root: Path) -> "tuple[RecordedPosition, str]":
    """The position and its run; "" for a game that was played in the browser."""
    from entente.reports.games import find_game, is_name_of_run
    from entente.reports.replayed import position_of_played_game, position_of_run

    if game.endswith(".json"):
        return position_of_played_game(Path(game), phase), ""
    if is_name_of_run(game):
        run = which_run(run, runs_root)
        found = find_game(paths := RunPaths(runs_root / run), game)
        if found.lacking:
            sys.stderr.write(f"{found.lacking}\n")
        return position_of_run(paths, found, phase), run
    folder = runs_root / GAMES_FOLDER
    file = folder / f"{check_name(game, 'The game')}.json"
    if not file.exists():
        raise InputError(f"there is no game '{game}' in '{folder}'; a run's game is START_GROUP/FORK, latest, best or worst")
    return position_of_played_game(file, phase), ""


def _ask(
    position: "RecordedPosition",
    power: str,
    changed: "OrderSets | None",
    version: str,
    how: "Continuation",
    contestants: "list[Contestant]",
    runs_root: Path,
) -> "WhatIf":
    from entente.evaluation.what_if import orders_of_player, play_pairs

    async def ask(deciders: "Mapping[str, Decider]") -> "WhatIf":
        sets = [changed or {}] * how.forks
        if version:
            sets = await orders_of_player(position, power, version, how, deciders.get(version))
        return await play_pairs(position, sets, power, how, deciders)

    if not any(player.is_policy or player.searches for player in contestants):
        return asyncio.run(ask({}))
    return with_open_players(contestants, runs_root, None, lambda opened: opened.host.run(ask(opened.deciders)))


def _show(answer: "WhatIf", change: str) -> None:
    from rich.table import Table

    from entente.cli.terminal import output_console
    from entente.evaluation.intervals import format_interval
    from entente.reports.sentences import what_if_verdict

    console = output_console()
    centres = Table("centres at the end", "as played", "what if", "difference", "95 % interval", box=None)
    for power in sorted(POWERS, key=lambda power: power != answer.power):
        (played, changed), difference = answer.centres(power), answer.difference_of(power)
        means = f"{played.mean:.2f}", f"{changed.mean:.2f}", f"{difference.mean:+.2f}"
        centres.add_row(power.title(), *means, format_interval(difference.interval, "+.2f"))
    for line in (change, centres, what_if_verdict(answer)):
        if isinstance(line, str):
            console.print(shown(line), markup=False, soft_wrap=not console.is_terminal)
        else:
            console.print(line)


def _facts(answer: "WhatIf", change: str, changed: "OrderSets | None", version: str) -> dict[str, Any]:
    from entente.reports.sentences import what_if_verdict

    seat = POWERS.index(answer.power)

    def estimates(power: str) -> dict[str, Any]:
        three = (*answer.centres(power), answer.difference_of(power))
        return {
            name: {"mean": each.mean, "interval": each.interval}
            for name, each in zip(("played", "changed", "difference"), three, strict=True)
        }

    return {
        "game": answer.position.game,
        "phase": answer.position.board.phase,
        "power": answer.power,
        "change": change,
        "played": answer.position.orders,
        "changed": changed,
        "version": version or None,
        **asdict(answer.how),
        "verdict": what_if_verdict(answer),
        "difference": estimates(answer.power)["difference"],
        "centres": {power: estimates(power) for power in POWERS},
        "pairs": [[pair.played.centres[seat], pair.changed.centres[seat]] for pair in answer.pairs],
    }
