"""What `entente enter` is asked to play: account, games and power, and which games and seats these can be."""

import random
from collections.abc import Mapping
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
    account: Account
    games: tuple[str, ...]
    """Ids of the games to play."""
    power: str = ""
    """The power to take in each; empty: one that is free."""
    game_password: str | None = field(default=None, repr=False)
    """Password with which games are joined that ask for one."""
    draw_after: int = 0
    """Game year after which the seat votes for a draw; 0: never."""
    player: str
    """Who orders: a name of `Players`."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGame:
    """A game that is over, as the server tells it."""

    game: str
    saved: Mapping[str, Any]
    """See `ServerClient.saved`."""
    power: str
    """Our power."""
    controllers: Mapping[str, str]
    probabilities: Mapping[str, float]
    """Of the order sets that a version drew, by phase."""


def check_game(entry: Entry, found: ServerGame) -> None:
    """Raise InputError unless the account has a seat in the game or may take one."""
    if why := refusal(found):
        raise InputError(f"game '{found.game}' {why}")
    if found.mine:
        if entry.power and entry.power not in found.mine:
            plays = f"account '{entry.account.name}' plays {found.mine[0]} in game '{found.game}'"
            raise InputError(f"{plays}, not {entry.power}: leave out --power")
        return
    if found.status == "completed":
        raise InputError(f"game '{found.game}' is over, and the account had no seat in it")
    if found.players >= found.seats:
        raise InputError(f"game '{found.game}' is full: {found.players} of {found.seats} seats are taken")
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


async def join_free(entry: Entry, client: ServerClient, token: str, name: str) -> JoinedGame:
    """Take the wanted power, or any that nobody has. Others may take it in between, so each is tried once.

    Raises:
        InputError: none can be taken.
    """
    free, wanted = await client.free_powers(token, name), entry.power
    if wanted and wanted not in free:
        raise InputError(f"{wanted} is taken in game '{name}': free is {', '.join(free) or 'no power'}")
    random.Random(f"{name}/{entry.account.name}").shuffle(free)
    last = "it is full"
    for power in [wanted] if wanted else free:
        try:
            return await join(entry, client, token, name, power)
        except RefusedError as error:
            last = str(error)
    raise InputError(f"account '{entry.account.name}' cannot join game '{name}': {last}")


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
