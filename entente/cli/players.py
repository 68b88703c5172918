"""Players named on the command line: their options, resolution of their names, and their engines."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter, validators

from entente.cli.options import which_run
from entente.evaluation.settings import PlaySettings
from entente.game.snapshot import POWERS
from entente.players.search_settings import SearchSettings
from entente.telemetry.errors import InputError

if TYPE_CHECKING:
    from entente.evaluation.contestants import Contestant
    from flows.open_players import OpenPlayers

T = TypeVar("T")
Temperature = Annotated[float, Parameter(help="Sampling temperature of versions.", validator=validators.Number(gt=0, lte=4))]
"""With the bounds of `PlaySettings`."""
Search = Annotated[
    SearchSettings | None,
    Parameter(group=Group("Search", help="For players such as v20+search and dumbbot+search."), help="Any search setting."),
]


def how_they_play(temperature: float | None, search: SearchSettings | None, strategy: str = "sample") -> PlaySettings:
    """Checked settings, of which only those set on the command line are set, so that `check_play_is_used` can tell."""
    asked: dict[str, Any] = {"strategy": strategy} if strategy != "sample" else {}
    if temperature not in (None, 1):
        asked["temperature"] = temperature
    if search is not None:
        asked["search"] = search.model_dump(exclude_unset=True)
    return PlaySettings.model_validate(asked)


def named_powers(text: str) -> list[str]:
    named = [power.strip().upper() for power in text.split(",") if power.strip()]
    for power in named:
        if power not in POWERS:
            raise InputError(f"there is no power '{power}': the powers are {', '.join(POWERS)}")
    return named


def with_run(who: str, run: str, runs_root: Path) -> str:
    """Prefix a version's name with its run, so that a stored game can be continued without --run."""
    from entente.evaluation.contestants import needs_run

    return f"{which_run(run, runs_root)}:{who}" if needs_run([who]) else who


def resolve_players(names: Iterable[str], run: str, runs_root: Path) -> "tuple[dict[str, str], list[Contestant]]":
    """Resolve names such as 'newest', in `run` unless they name one. Returns name -> resolved name, and the players."""
    from entente.evaluation.contestants import needs_run, resolve_contestants

    names = list(dict.fromkeys(names))
    players = resolve_contestants(names, which_run(run, runs_root) if needs_run(names) else "", runs_root)
    if endpoint := next((player.name for player in players if player.is_endpoint), ""):
        raise InputError(f"'{endpoint}' plays in matches and rollouts only: name another player")
    return dict(zip(names, (player.name for player in players), strict=True)), players


def with_open_players(
    players: "list[Contestant]", runs_root: Path, how: PlaySettings | None, play: "Callable[[OpenPlayers], Awaitable[T]]"
) -> T:
    """Open the players' engines, and return the result of `play` on a new event loop."""
    from entente.prefect_server.own_server import prefect_server
    from flows.open_players import open_players

    async def opened() -> T:
        async with open_players(players, runs_root, how or PlaySettings()) as them:
            return await play(them)

    with prefect_server() if any(player.run for player in players) else nullcontext():  # a run may have to make its tiny model
        return asyncio.run(opened())
