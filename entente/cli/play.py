"""`entente play`: a game against policy versions and scripted players, in the browser."""

import random
import shlex
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from entente.cli.options import Run, RunsRoot
from entente.cli.players import Search, Temperature, how_they_play, named_powers, resolve_players, with_open_players, with_run
from entente.game.scripted import SEARCHES
from entente.game.snapshot import POWERS
from entente.telemetry.errors import InputError
from entente.telemetry.progress import shown
from storage.files import file_lock, make_directory
from storage.runs import GAMES_FOLDER, LATEST, check_name

if TYPE_CHECKING:
    from entente.evaluation.contestants import Contestant
    from entente.evaluation.settings import PlaySettings
    from flows.open_players import OpenPlayers
    from storage.played_games import SavedGame


def play(
    *,
    power: Annotated[str, Parameter(help="Powers that people play, separated by commas.")] = "france",
    watch: Annotated[
        bool, Parameter(help="No human players: watch the others, a phase at a click, or one after another.", negative="")
    ] = False,
    against: Annotated[
        str,
        Parameter(
            help="Players of the other powers, separated by commas: newest, v20, other:v20, a folder, dumbbot, each also +search."
        ),
    ] = "dumbbot",
    run: Run = LATEST,
    game: Annotated[str, Parameter(help="Name of the game, or its file; an existing game is continued.")] = "",
    seed: Annotated[int, Parameter(help="Seed of a new game: seat assignment and all random choices.")] = 0,
    years: Annotated[
        int,
        Parameter(help="Game years until a new game ends; 0: until a power wins.", validator=validators.Number(gte=0, lte=100)),
    ] = 0,
    temperature: Temperature = 1.0,
    port: Annotated[int, Parameter(help="Port; 0: any free one.", validator=validators.Number(gte=0, lte=65535))] = 0,
    browser: Annotated[bool, Parameter(help="Open the page in the browser.")] = True,
    runs_root: RunsRoot = Path("runs"),
    search: Search = None,
) -> None:
    """Play a game in the browser, or watch one, until Ctrl-C. Every phase is stored, so a game can be continued at any time.

    Serves the page on this machine only, at a URL with a secret key. Assigns the players of --against to seats at random. A game
    with --watch waits for its page: "play the next phase" resolves one, "play on by itself" one after another until "pause".

    Examples

        entente play

        entente play --power turkey --against dumbbot+search --years 6

        entente play --run mine --against newest,newest+search --game evening

        entente play --game evening          continue that game

        entente play --game shared.json      a game file that you were sent

        entente play --watch --run mine --against newest,dumbbot

        entente play --against ./exported/mine      an adapter or a model, by its folder
    """
    from storage.played_games import read_game

    file = _file(game, runs_root)
    how = how_they_play(temperature, search)
    seats: dict[str, str] = {}
    if file.exists():
        _check_code(read_game(file), file, against)  # a file that is none is refused before anything is written
    else:
        seats = _seats("" if watch else power, against, seed)
        seats = _resolved({power: with_run(who, run, runs_root) for power, who in seats.items()}, how, runs_root)[0]
    make_directory(file.parent)
    with file_lock(file.with_name(f".{file.name}.lock")) as mine:
        if not mine:
            raise InputError(f"game '{file}' is open in another `entente play`: close that, or name another --game")
        _play(file, seats, how, seed, years, port, runs_root, browser=browser)


def _check_code(stored: "SavedGame", file: Path, against: str) -> None:
    """Raise InputError if a seat is a `module:attribute` that --against does not name: a file from elsewhere may name any module
    of this machine, whose import runs it."""
    from entente.evaluation.contestants import runs_code

    named = [name.strip() for name in against.split(",")]
    if code := next((who for who in stored.seats.values() if runs_code(who) and who not in named), ""):
        raise InputError(f"the player '{code}' of game '{file}' is code of this machine: to run it, name it with --against too")


def _resolved(seats: dict[str, str], how: "PlaySettings", runs_root: Path) -> "tuple[dict[str, str], list[Contestant]]":
    from entente.evaluation.contestants import check_play_is_used, resolve_contestants
    from entente.live_games.game import HUMAN

    meant, players = resolve_players((who for who in seats.values() if who != HUMAN), "", runs_root)
    if (helper := "dumbbot" + SEARCHES) not in meant:  # gives hints
        players += resolve_contestants([helper], "", runs_root)
    check_play_is_used(players, how)
    return {power: meant.get(who, who) for power, who in seats.items()}, players


def _play(
    file: Path, seats: dict[str, str], how: "PlaySettings", seed: int, years: int, port: int, runs_root: Path, *, browser: bool
) -> None:
    from entente.live_games.game import PlayedGame
    from entente.live_games.game_file import GameFile, open_game
    from entente.live_games.http_server import bind, make_server, new_key, serve
    from entente.live_games.seats import SeatedPlayers
    from entente.live_games.server import play_app
    from storage.played_games import read_game

    stored = read_game(file) if file.exists() else None  # another command may have begun and left it before the lock was ours
    as_before = _goes_on(stored) if stored else ""
    seats, players = _resolved(dict(stored.seats) if stored else seats, how, runs_root)

    async def serve_game(opened: "OpenPlayers") -> None:
        seated = SeatedPlayers([player.name for player in players], opened, how.temperature)
        if stored:
            game = open_game(stored.model_copy(update={"seats": seats}), seated, file)
        else:
            game = PlayedGame(file.stem, seats, seated, seed=seed, years=years)
        kept = GameFile(file)
        game.keep = lambda: kept.write(game)
        await game.keep()
        key, address = new_key(), f"127.0.0.1:{listener.getsockname()[1]}"
        app = play_app(game, seated.names, key, address, shlex.quote(str(file)))
        url = f"http://{address}/?key={key}"
        server = make_server(app, drain_s=1, on_shutdown=lambda: game.changed.set())
        await serve(server, listener, on_ready=lambda: _announce(url, file, as_before, browser=browser))

    with bind("127.0.0.1", port, None) as listener:
        with_open_players(players, runs_root, how, serve_game)


def _announce(url: str, file: Path, as_before: str, *, browser: bool) -> None:
    print(f"{url}\n{as_before}The game is stored in {file}. Ctrl-C ends it here.", flush=True)
    if browser:
        webbrowser.open(url)


def _goes_on(game: "SavedGame") -> str:
    """Who plays a continued game. Options of a new game do not change it, and the same command may be run again."""
    from entente.live_games.game import FIRST_YEAR, HUMAN

    people = ", ".join(power.title() for power, who in game.seats.items() if who == HUMAN) or "none"
    others = ", ".join(sorted(set(game.seats.values()) - {HUMAN})) or "none"
    end = f"to the end of {FIRST_YEAR + game.years - 1}" if game.years else "until a power wins"
    who = shown(f"people: {people}; other players: {others}; {end}")
    return (
        f"It goes on as it began ({who}); --power, --watch, --against, --years and --seed are for a new game. Temperature and "
        "search are not stored: this command's apply.\n"
    )


def _file(game: str, runs_root: Path) -> Path:
    if game.endswith(".json"):
        return Path(game)
    folder = runs_root / GAMES_FOLDER
    if game:
        return folder / f"{check_name(game, 'The game')}.json"
    number = 1
    while (folder / f"game-{number}.json").exists():
        number += 1
    return folder / f"game-{number}.json"


def _seats(people: str, against: str, seed: int) -> dict[str, str]:
    from entente.live_games.game import HUMAN

    wanted = named_powers(people)
    names = [name.strip() for name in against.split(",") if name.strip()]
    if not names:
        raise InputError("the other powers need a player: give --against, as 'dumbbot'")
    others = [power for power in POWERS if power not in wanted]
    random.Random(f"seats {seed}").shuffle(others)
    dealt = {power: names[number % len(names)] for number, power in enumerate(others)}
    return {power: HUMAN if power in wanted else dealt[power] for power in POWERS}
