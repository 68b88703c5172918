"""Starts and kills the diplomacy package's real server in a process of its own, and makes games on it as its master."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from diplomacy.communication import requests, responses
from diplomacy.utils import strings

from entente.game.server_client import ServerClient, ServerGame, connect

ROOT = Path(__file__).resolve().parents[2]
_Found = TypeVar("_Found")


class ServerProcess:
    """A server on a port of its own, with its games in `folder`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with the games that it saved before."""
        words = [sys.executable, "-m", "tests.entered.quick_server", str(self._folder), "--port", str(self.port)]
        with open(self._folder.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        while True:
            with socket.socket() as caller:
                if caller.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, self._folder.with_suffix(".log").read_text()[-2000:]
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, without a save."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def as_master(self, work: Callable[[ServerClient, str], Awaitable[_Found]]) -> _Found:
        """What `work` returns for a connection and the token of the server's own administrator."""

        async def called() -> _Found:
            async with connect(self.address) as client:
                return await work(client, await client.sign_in("admin", "password"))

        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
            return thread.submit(asyncio.run, called()).result()

    def make_game(self, game: str, **settings: Any) -> None:
        """Make a game; `settings` are those of the package's request, whose deadline is 0 if none is given."""
        asked = {"deadline": 0, "rules": ["NO_PRESS", "POWER_CHOICE"]} | settings

        async def make(client: ServerClient, token: str) -> None:
            await client._ask(requests.CreateGame(token=token, game_id=game, **asked), responses.DataGame)

        self.as_master(make)

    def set_status(self, game: str, status: str) -> None:
        """Let the master end or cancel the game."""

        async def change(client: ServerClient, token: str) -> None:
            await client.join(token, game, None, None)
            request = requests.SetGameStatus(
                token=token, game_id=game, game_role=strings.OMNISCIENT_TYPE, phase="", status=status
            )
            await client._ask(request, responses.Ok)

        self.as_master(change)

    def game(self, game: str) -> ServerGame:
        """The game in the server's list."""

        async def look(client: ServerClient, token: str) -> ServerGame:
            (found,) = await client.games(token, [game])
            return found

        return self.as_master(look)
