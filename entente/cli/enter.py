"""`entente enter`: a version plays on a remote diplomacy server, or on a webDiplomacy site."""

import asyncio
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from entente.cli.options import Run, RunsRoot
from entente.cli.players import Search, Temperature, how_they_play, named_powers, resolve_players, with_open_players, with_run
from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.progress import shown
from storage.runs import GAMES_FOLDER, LATEST

if TYPE_CHECKING:
    from entente.evaluation.contestants import Contestant
    from entente.evaluation.settings import PlaySettings
    from entente.live_games.enter import Entry
    from flows.open_players import OpenPlayers

_ACCOUNT, _PASSWORD, _GAME_PASSWORD = "ENTENTE_ACCOUNT", "ENTENTE_PASSWORD", "ENTENTE_GAME_PASSWORD"
_WEB_KEY = "ENTENTE_WEBDIPLOMACY_KEY"


def enter(
    address: Annotated[str, Parameter(help="HOST:PORT of a diplomacy server, or the URL of a webDiplomacy site's api.php.")],
    *,
    game: Annotated[
        str, Parameter(help="Ids of games to play, separated by commas; on webDiplomacy the default is all of the key's.")
    ] = "",
    power: Annotated[str, Parameter(help="Power to take; default: a free one.")] = "",
    player: Annotated[
        str, Parameter(help="The player: newest, v20, other:v20, the folder of a model or adapter, dumbbot, also with +search.")
    ] = "newest",
    run: Run = LATEST,
    draw_after: Annotated[
        int, Parameter(help="Vote for a draw in each phase after this game year; 0: never.", validator=validators.Number(gte=0))
    ] = 0,
    seed: Annotated[int, Parameter(help="Seed of all random choices.")] = 0,
    temperature: Temperature = 1.0,
    runs_root: RunsRoot = Path("runs"),
    search: Search = None,
) -> None:
    """Play on the diplomacy package's own server, several games at once, until they are over, and store the results.

    Set ENTENTE_ACCOUNT and ENTENTE_PASSWORD, or the command prompts for them; the server creates a missing account. Set
    ENTENTE_GAME_PASSWORD to the password of a private game. After a crash of this command or of the server, the same
    command continues from the server's state. Messages between players (press) are ignored.

    On a webDiplomacy site, ENTENTE_WEBDIPLOMACY_KEY holds the API key of an account that has joined the games. The command
    looks once a minute for seats that lack orders, until Ctrl-C.

    Examples

        entente enter league.example:8432 --game friday --power france --run mine --player newest

        entente enter 127.0.0.1:8432 --game a,b --player models/whole-192 --draw-after 1910

        entente enter https://webdiplomacy.net/api.php --player models/whole-192+search
    """
    how = how_they_play(temperature, search)
    if address.startswith(("http://", "https://")):
        if power or draw_after:
            raise InputError("on webDiplomacy the account's games fix powers, and nobody votes: leave out --power, --draw-after")
        return _play_web(address, game, player, run, how, seed, runs_root)
    _check_address(address)
    ids = tuple(dict.fromkeys(each.strip() for each in game.split(",") if each.strip()))
    wanted = named_powers(power)
    if len(wanted) > 1:
        raise InputError(f"--power names {' and '.join(wanted)}: name one")
    if not ids:
        raise InputError("--game names no game: give the ids of games, separated by commas")
    who = _resolved(player, run, how, runs_root)
    account, password = _secret(_ACCOUNT, "account", hidden=False), _secret(_PASSWORD, "password")
    from entente.live_games.enter import Entry

    entry = Entry(
        address=address,
        account=account,
        password=password,
        games=ids,
        power="".join(wanted),
        game_password=os.environ.get(_GAME_PASSWORD) or None,
        draw_after=draw_after,
        player=who.name,
        seed=seed,
    )
    _play(entry, who, how, runs_root)


def _resolved(player: str, run: str, how: "PlaySettings", runs_root: Path) -> "Contestant":
    from entente.evaluation.contestants import check_play_is_used

    _, (who,) = resolve_players([with_run(player, run, runs_root)], "", runs_root)
    check_play_is_used([who], how)
    return who


def _play(entry: "Entry", who: "Contestant", how: "PlaySettings", runs_root: Path) -> None:
    from entente.live_games.enter import EnteredGames

    entered = EnteredGames(entry, runs_root / GAMES_FOLDER, _say)
    asyncio.run(entered.check())  # before seconds of imports

    from entente.live_games.seats import SeatedPlayers

    with_open_players([who], runs_root, how, lambda opened: entered.play(SeatedPlayers([who.name], opened, how.temperature)))
    if entered.lost:
        raise EntenteError(f"{len(entered.lost)} of the games could not be stored: {', '.join(entered.lost[:10])}")


def _play_web(url: str, game: str, player: str, run: str, how: "PlaySettings", seed: int, runs_root: Path) -> None:
    from entente.game.webdiplomacy import WebDiplomacy, web_session
    from entente.live_games.seats import SeatedPlayers
    from entente.live_games.web_seats import WebSeats

    ids = [each.strip() for each in game.split(",") if each.strip()]
    if wrong := [each for each in ids if not each.isdecimal()]:
        raise InputError(f"--game names '{wrong[0]}': games of webDiplomacy have numbers")
    who = _resolved(player, run, how, runs_root)
    key = _secret(_WEB_KEY, "API key")

    async def play(opened: "OpenPlayers") -> None:
        async with web_session() as session:
            players = SeatedPlayers([who.name], opened, how.temperature)
            await WebSeats(WebDiplomacy(session, url, key), players, who.name, seed, {int(each) for each in ids}, _say).play()

    with_open_players([who], runs_root, how, play)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    scheme = address.partition("://")[0] if "://" in address else "ws"
    if scheme not in ("ws", "wss") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"'{address[:100]}' is no address of a server: give HOST:PORT, such as 127.0.0.1:8432")


def _secret(variable: str, what: str, *, hidden: bool = True) -> str:
    if secret := os.environ.get(variable):
        return secret
    if not sys.stdin.isatty():
        raise InputError(f"the {what} is missing: set {variable} to it, or give the command in a terminal, which asks for it")
    secret = getpass.getpass(f"{what}: ") if hidden else input(f"{what}: ")
    if not secret:
        raise InputError(f"the {what} is empty")
    return secret


def _say(sentence: str) -> None:
    print(shown(sentence), flush=True)
