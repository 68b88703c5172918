"""Seats on the real server: a deadline, and what cannot be played."""

import asyncio
from pathlib import Path

import pytest
from diplomacy.utils.common import hash_password

from entente.game.server_client import connect
from entente.live_games.enter import EnteredGames, Entry
from storage.played_games import read_game
from tests.command import Entente
from tests.entered.server_process import ServerProcess

pytestmark = pytest.mark.system


def test_a_late_seat_has_default_orders_and_says_so(server: ServerProcess, first_orders, tmp_path: Path):
    server.make_game("hurried", deadline=4, n_controls=2)
    told: list[str] = []
    entry = Entry(address=server.address, account="ours", password="hush", games=("hurried",), power="FRANCE", player="first")
    games, player = EnteredGames(entry, tmp_path, told.append), first_orders(slow=("S1901M",), slow_s=30)

    async def play() -> None:
        playing = asyncio.create_task(games.play(player))
        async with connect(server.address) as client:
            token = await client.sign_in("rosa", "hush")
            await client.join(token, "hurried", "AUSTRIA", None)
            while (await client.games(token, ["hurried"]))[0].status != "active":
                await asyncio.sleep(0.05)
            for phase, orders in (("S1901M", ["A VIE - TYR", "F TRI - VEN"]), ("F1901M", [])):
                await client.give_orders(token, "hurried", "AUSTRIA", phase, orders)
                async with asyncio.timeout(60):
                    while (await client.games(token, ["hurried"]))[0].phase == phase:
                        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.set_status, "hurried", "completed")
        await asyncio.wait_for(playing, 60)

    asyncio.run(play())
    assert games.missed == 1 and games.lost == []
    assert told[0] == "FRANCE missed the deadline of S1901M of game 'hurried'" and len(told) == 2
    (file,) = tmp_path.glob("*.json")
    kept = read_game(file)
    spring, autumn = kept.turns[:2]
    assert spring.orders["AUSTRIA"] == ("A BUD H", "F TRI - VEN", "A VIE - TYR")
    assert spring.orders["FRANCE"] == ("F BRE H", "A MAR H", "A PAR H")
    assert set(autumn.orders["FRANCE"]) != {"F BRE H", "A MAR H", "A PAR H"}
    assert player.last_orders["F1901M"]["AUSTRIA"] == spring.orders["AUSTRIA"], "the server's record of the season before"
    assert kept.seats["AUSTRIA"].startswith("rosa@")


def test_what_cannot_be_played_is_one_sentence(server: ServerProcess, entente: Entente):
    server.make_game("taken", n_controls=1)
    server.make_game("private", registration_password=hash_password("sesame"))

    async def take() -> None:
        async with connect(server.address) as client:
            await client.join(await client.sign_in("rosa", "hush"), "taken", "TURKEY", None)
            await client.sign_in("ours", "hush")

    asyncio.run(take())
    right = {"ENTENTE_ACCOUNT": "ours", "ENTENTE_PASSWORD": "hush"}
    player = ["--player", "random"]
    for words, environment, sentence in (
        (["--game", "taken", *player], right | {"ENTENTE_PASSWORD": "wrong"}, "the password is not the account's"),
        (["--game", "nowhere", *player], right, f"there is no game 'nowhere' on {server.address}: it has"),
        (["--game", "taken", *player], right, "game 'taken' is full: 1 of 1 seats are taken"),
        (["--game", "private", *player], right, "game 'private' asks for a password: set ENTENTE_GAME_PASSWORD to it"),
        (["--game", "private", *player], right | {"ENTENTE_GAME_PASSWORD": "open"}, "the password for game 'private' is wrong"),
        (["--game", "taken", *player], {}, "the account is missing: set ENTENTE_ACCOUNT"),
    ):
        done = Entente(entente.folder, **environment)("enter", server.address, *words)
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, (words, done.stderr)
        assert "wrong" not in done.stderr or "ENTENTE_GAME" in done.stderr
    assert list(entente.folder.rglob("*.json")) == []
