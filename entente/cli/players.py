"""Players that a command names: their options, who they are today, and the engines that they draw with."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Group, Parameter

from entente.cli.options import which_run
from entente.players.search_settings import SearchSettings
from entente.telemetry.errors import InputError

if TYPE_CHECKING:
    from entente.evaluation.contestants import Contestant
    from entente.evaluation.settings import PlaySettings
    from flows.open_players import OpenPlayers

T = TypeVar("T")
Temperature = Annotated[float, Parameter(help="Temperature of a version's draws.")]
Search = Annotated[
    SearchSettings | None,
    Parameter(
        group=Group("Search", help="For players such as v20+search and dumbbot+search."), help="Any setting of the search."
    ),
]


def how_they_play(temperature: float, search: SearchSettings | None) -> "PlaySettings":
    """The checked settings; of the search only what was given."""
    from entente.evaluation.settings import PlaySettings

    given = {"search": search.model_dump(exclude_unset=True)} if search else {}
    return PlaySettings.model_validate({"temperature": temperature} | given)


def named_powers(text: str) -> list[str]:
    """The powers in `text`, with commas."""
    from entente.game.snapshot import POWERS

    named = [power.strip().upper() for power in text.split(",") if power.strip()]
    for power in named:
        if power not in POWERS:
            raise InputError(f"there is no power '{power}': the powers are {', '.join(POWERS)}")
    return named


def with_run(who: str, run: str, runs_root: Path) -> str:
    """A version's name with its run, so that a stored game can be continued by its name alone; other names as they are."""
    from entente.evaluation.contestants import needs_run

    return f"{which_run(run, runs_root)}:{who}" if needs_run([who]) else who


def resolve_players(names: Iterable[str], run: str, runs_root: Path) -> "tuple[dict[str, str], list[Contestant]]":
    """What each name means today ('newest' may be another version tomorrow), and the players.

    Args:
        run: that versions without a run's name belong to.
    """
    from entente.evaluation.contestants import needs_run, resolve_contestants

    names = list(dict.fromkeys(names))
    players = resolve_contestants(names, which_run(run, runs_root) if needs_run(names) else "", runs_root)
    if endpoint := next((player.name for player in players if player.is_endpoint), ""):
        raise InputError(f"'{endpoint}' plays in matches and rollouts only: name another player")
    return dict(zip(names, (player.name for player in players), strict=True)), players


def with_open_players(
    players: "list[Contestant]", runs_root: Path, how: "PlaySettings | None", play: "Callable[[OpenPlayers], Awaitable[T]]"
) -> T:
    """What `play` returns, on an event loop of its own, while the players' engines are open."""
    from entente.evaluation.settings import PlaySettings
    from entente.prefect_server.own_server import prefect_server
    from flows.open_players import open_players

    async def opened() -> T:
        async with open_players(players, runs_root, how or PlaySettings()) as them:
            return await play(them)

    with prefect_server() if any(player.run for player in players) else nullcontext():  # a run may have to make its tiny model
        return asyncio.run(opened())
