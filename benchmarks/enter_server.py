"""What `entente enter` costs apart from the server: `python -m benchmarks.enter_server [GAMES] [LAST_YEAR] [PLAYER]`.

The real server, one `entente enter` with one seat in each game, and another with the six other seats are three processes on this
machine. All games run at once; after LAST_YEAR everybody votes for a draw. CPU is counted from when all seats are taken until the
first command has written its last game, so neither imports nor sign-ins are in it. The output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from game.server_client import ServerLostError, connect
from game.snapshot import POWERS

_OURS, _THEIRS = POWERS[2:3], POWERS[:2] + POWERS[3:]
_EVERY_S = 0.2


def measure(games: int, last_year: int, player: str, folder: Path) -> dict[str, float]:
    """CPU seconds of the command and of the server, and phases played."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, ids = f"127.0.0.1:{port}", [f"bench-{number}" for number in range(games)]
    with open(folder / "server.log", "wb") as log:
        words = [sys.executable, "-m", "game.diplomacy_server", str(folder / "server"), "--port", str(port)]
        server = subprocess.Popen(words, stdout=log, stderr=log)
    commands: list[subprocess.Popen[bytes]] = []
    try:
        asyncio.run(_make_games(address, ids))
        commands += [_enter(address, ids, _OURS, player, last_year, folder / "ours")]
        commands += [_enter(address, ids, _THEIRS, "random", last_year, folder / "theirs")]
        asyncio.run(_wait_for_seats(address, ids))
        both, began = [psutil.Process(commands[0].pid), psutil.Process(server.pid)], time.monotonic()
        first = last = [_cpu_s(each) for each in both]
        while commands[0].poll() is None:
            last = [_cpu_s(each) for each in both]
            time.sleep(_EVERY_S)
        seconds = time.monotonic() - began
        if commands[0].returncode:
            raise SystemExit(f"entente enter ended with {commands[0].returncode}: see {folder}")
        commands[1].wait()
    finally:
        for process in (*commands, server):
            process.kill()
            process.wait()
    files = list((folder / "ours" / "runs" / "_games").glob("*.json"))
    phases = sum(len(json.loads(file.read_text())["turns"]) for file in files)
    ours, theirs = (after - before for before, after in zip(first, last, strict=True))
    return {
        "games": len(files),
        "game_phases": phases,
        "seconds": round(seconds, 1),
        "game_phases_per_s": round(phases / seconds, 1),
        "own_cpu_ms_per_phase": round(1000 * ours / phases, 2),
        "server_cpu_ms_per_phase": round(1000 * theirs / phases, 2),
    }


def _enter(
    address: str, ids: list[str], powers: tuple[str, ...], player: str, last_year: int, folder: Path
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    words = ["enter", address, "--game", ",".join(ids), "--power", ",".join(powers), "--player", player]
    environment = os.environ | {"ENTENTE_ACCOUNT": folder.name, "ENTENTE_PASSWORD": "bench", "PYTHONPATH": os.getcwd()}
    with open(folder / "log", "wb") as log:
        program = [sys.executable, "-m", "cli.main", *words, "--draw-after", str(last_year)]
        return subprocess.Popen(program, cwd=folder, env=environment, stdout=log, stderr=log)


async def _make_games(address: str, ids: list[str]) -> None:
    while True:
        try:
            async with connect(address) as client:
                token = await client.sign_in("admin", "password")
                for name in ids:
                    await client.make_game(token, name)
                return
        except ServerLostError:
            await asyncio.sleep(_EVERY_S)  # it still starts


async def _wait_for_seats(address: str, ids: list[str]) -> None:
    async with connect(address) as client:
        token = await client.sign_in("admin", "password")
        while any(each.players < each.seats for each in await client.games(token, ids)):
            await asyncio.sleep(_EVERY_S)


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.enter_server", description="The cost of `entente enter`.")
    parser.add_argument("games", type=int, nargs="?", default=100, help="games at once (%(default)s)")
    parser.add_argument("last_year", type=int, nargs="?", default=1901, help="year after which all vote for a draw (%(default)s)")
    parser.add_argument("player", nargs="?", default="random", help="who has the measured seats (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(given.games, given.last_year, given.player, Path(place))
    sys.stdout.write(json.dumps(found) + "\n")
