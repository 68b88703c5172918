"""What `entente enter` is asked to play: accounts, games and powers, and which games and seats these can be."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from game.recorded import MAP, RULES
from game.server_client import JoinedGame, RefusedError, ServerClient, ServerGame
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account on the server."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What to play."""

    address: str
    """HOST:PORT, with ws:// or wss:// before it if it is not plain."""
    accounts: Sequence[Account]
    """One for each seat in a game."""
    games: tuple[str, ...] = ()
    """Ids of the games to play; empty: `waiting` games that wait for players."""
    waiting: int = 0
    powers: tuple[str, ...] = ()
    """The power of each account; empty: one that is free."""
    game_password: str | None = field(default=None, repr=False)
    """Password with which games are joined that ask for one."""
    draw_after: int = 0
    """Game year after which each seat votes for a draw; 0: never."""
    player: str
    """Who orders: a name of `Players`."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGame:
    """A game that is over, as the server tells it."""

    game: str
    saved: Mapping[str, Any]
    """See `ServerClient.saved`."""
    powers: tuple[str, ...]
    """Our powers."""
    controllers: Mapping[str, str]
    probabilities: Mapping[str, Mapping[str, float]]
    """Of the order sets that a version drew, by phase and power."""


def choose_games(entry: Entry, listed: Sequence[Mapping[str, ServerGame]], say: Callable[[str], None]) -> list[str]:
    """The ids of the games to play, each of which can be.

    Args:
        listed: the games by id, as each account sees them.
        say: takes a sentence for the user.

    Raises:
        InputError: a game cannot be played, or none waits.
    """
    if entry.games:
        for name in entry.games:
            check_game(entry, [by_id[name] for by_id in listed])
        return list(entry.games)
    seats = len(entry.accounts)
    mine = [name for name, each in listed[0].items() if each.mine and each.status != "completed" and not refusal(each)]
    free = [
        name
        for name, each in listed[0].items()
        if not each.mine
        and each.status == "forming"
        and each.seats - each.players >= seats
        and (not each.has_password or entry.game_password)
        and not refusal(each)
    ]
    chosen = [*sorted(mine), *sorted(free)][: entry.waiting]
    if not chosen:
        raise InputError(f"no game on {entry.address} waits for players: name one with --game")
    if len(chosen) < entry.waiting:
        say(f"{len(chosen)} games wait for players, not {entry.waiting}: these are played")
    return chosen


def check_game(entry: Entry, seen: Sequence[ServerGame]) -> None:
    """Raise InputError unless each account, to which the game looks as in `seen`, has a seat in it or may take one."""
    found, new = seen[0], sum(not each.mine for each in seen)
    if why := refusal(found):
        raise InputError(f"game '{found.game}' {why}")
    if not new:
        return
    if found.status == "completed":
        raise InputError(f"game '{found.game}' is over, and the account had no seat in it")
    if found.players + new > found.seats:
        taken = f"{found.players} of {found.seats} seats are taken"
        raise InputError(f"game '{found.game}' is full: {taken}{f', and {new} are wanted' if new > 1 else ''}")
    if found.has_password and not entry.game_password:
        raise InputError(f"game '{found.game}' asks for a password: set ENTENTE_GAME_PASSWORD to it")


async def join(entry: Entry, client: ServerClient, token: str, name: str, power: str) -> JoinedGame:
    """Take the power, or see the game as the account that has it.

    Raises:
        InputError: the game's password is wrong.
        RefusedError: the server refuses for another reason.
    """
    try:
        return await client.join(token, name, power, entry.game_password)
    except RefusedError as error:
        if error.kind == "GameRegistrationPasswordException":
            raise InputError(f"the password for game '{name}' is wrong: set ENTENTE_GAME_PASSWORD to the right one") from error
        raise


async def join_free(entry: Entry, client: ServerClient, token: str, name: str, account: Account, wanted: str) -> JoinedGame:
    """Take `wanted`, or any power that nobody has. Others may take it in between, so each is tried once.

    Raises:
        InputError: none can be taken.
    """
    free = await client.free_powers(token, name)
    if wanted and wanted not in free:
        raise InputError(f"{wanted} is taken in game '{name}': free is {', '.join(free) or 'no power'}")
    random.Random(f"{name}/{account.name}").shuffle(free)
    last = "it is full"
    for power in [wanted] if wanted else free:
        try:
            return await join(entry, client, token, name, power)
        except RefusedError as error:
            last = str(error)
    raise InputError(f"account '{account.name}' cannot join game '{name}': {last}")


def refusal(found: ServerGame) -> str:
    """Why the game cannot be played here, to stand after its name; empty if it can."""
    if found.map != MAP:
        return f"is on the map '{found.map}', and only '{MAP}' is played here"
    if unknown := sorted(set(found.rules) - RULES):
        return f"has the rule {unknown[0]}, which is not played here"
    return "was canceled on the server" if found.status == "canceled" else ""


def sign_in_refusal(address: str, account: Account, error: RefusedError) -> InputError:
    """The sentence for an account that the server does not let in."""
    words = {
        "UserException": "the password is not the account's",
        "ServerRegistrationException": "there is no such account, and the server takes no new ones",
    }
    return InputError(f"{address} does not let account '{account.name}' in: {words.get(error.kind, error)}")
