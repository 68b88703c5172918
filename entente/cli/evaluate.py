"""`entente evaluate`: measure the strength of a policy version on held-out positions, or of players and models in matches."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from entente.cli.options import AT_LEAST_1, NEWEST_VERSION, AsJson, Run, RunsRoot, Version, which_run
from entente.cli.players import how_they_play
from entente.cli.run_flow import run_flow
from entente.cli.terminal import cell, print_json
from entente.evaluation.protocols import protocol_match, protocols, usual_protocol
from entente.evaluation.settings import MatchSettings
from entente.players.endpoint import EndpointSettings
from entente.players.opponents import is_endpoint
from entente.players.search_settings import SearchSettings
from entente.settings.check_settings import check_settings
from entente.settings.find_model import check_room
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from storage.runs import LATEST, RunPaths

_MATCH = Group("Matches", help="Full games between several players; any of these options starts a match.")
_SEARCH = Group("Search", help="With --strategy search, or for players such as v20+search and dumbbot+search.")
_ENDPOINT = Group("Endpoints", help="For players such as openai:model@http://host:port/v1.")


def evaluate(
    *,
    run: Run = LATEST,
    version: Version = NEWEST_VERSION,
    runs_root: RunsRoot = Path("runs"),
    positions: Annotated[int | None, Parameter(help="Number of held-out positions; default: the run's setting.")] = None,
    opponents: Annotated[
        list[str] | None, Parameter(help="Scripted opponents; default: the run's setting. In a match: one name.", negative="")
    ] = None,
    players: Annotated[
        str,
        Parameter(
            group=_MATCH,
            help="Players, separated by commas: base, newest, v20, other:v20, the folder of a model or adapter, such as "
            "models/whole-192, or scripted players, each also with +search; or an endpoint openai:model@URL.",
        ),
    ] = "",
    protocol: Annotated[
        str,
        Parameter(
            group=_MATCH,
            help="Predefined match settings; --players and --games still apply: "
            + "; ".join(f"{name}: {each.about}" for name, each in protocols().items())
            + ".",
        ),
    ] = "",
    games: Annotated[
        int | None,
        Parameter(
            group=_MATCH,
            help="Games per player, or in total if all share one table; rounded up to a multiple of seven.",
            validator=AT_LEAST_1,
        ),
    ] = None,
    measure: Annotated[
        Literal["centres", "gained", "sos", "win", "survival", "solo"] | None,
        Parameter(group=_MATCH, help="Metric to compare players by; default: sos, the sum-of-squares share."),
    ] = None,
    start: Annotated[
        Literal["standard", "held-out"] | None, Parameter(group=_MATCH, help="Start positions of games; default: spring 1901.")
    ] = None,
    years: Annotated[int | None, Parameter(group=_MATCH, help="Game years after which a game is cut off; default: 6.")] = None,
    concurrency: Annotated[int | None, Parameter(group=_MATCH, help="Games played at the same time.")] = None,
    seed: Annotated[
        int | None, Parameter(group=_MATCH, help="Seed of start positions, sampling and scripted players; default: 1000.")
    ] = None,
    temperature: Annotated[float | None, Parameter(help="Sampling temperature of versions; default: 1.")] = None,
    strategy: Annotated[
        Literal["sample", "search"], Parameter(help="How versions choose orders: sampled, or by search.")
    ] = "sample",
    search: Annotated[SearchSettings | None, Parameter(group=_SEARCH, help="Any search setting.")] = None,
    endpoint: Annotated[EndpointSettings | None, Parameter(group=_ENDPOINT, help="Request settings for endpoints.")] = None,
    json: AsJson = False,
) -> None:
    """Score a policy version on held-out positions, or play full games between versions, models and scripted players.

    A match in which no player is a version of a run needs no run; its files then go to `_matches` in the folder of runs.

    A 95 % interval needs at least six independent games; games that are not independent count as one. To continue an interrupted
    match, run the same command again: it keeps finished games and restarts games in progress. With a larger --games it plays
    only the missing games.

    An OpenAI-compatible endpoint can play too. Its API key is read from an environment variable: ENTENTE_KEY_API_EXAMPLE_COM
    for https://api.example.com, ENTENTE_KEY_127_0_0_1_8000 for http://127.0.0.1:8000; a hyphen becomes two underscores.

    Examples

        entente evaluate --run mine

        entente evaluate --run mine --version 0 --opponents random --json

        entente evaluate --run mine --players newest,base,random,mover,territorial,dumbbot --games 70

        entente evaluate --run mine --players newest,other:v20 --start held-out --years 3 --measure centres

        entente evaluate --players models/whole-192,dumbbot --opponents dumbbot --games 70      needs no run

        entente evaluate --players models/whole-192             protocol whole-game, played until 1920

        entente evaluate --players models/whole-192 --protocol whole-game-reverse

        entente evaluate --players openai:qwen3@http://127.0.0.1:8000/v1 --opponents dumbbot --games 7 --years 3

        entente evaluate --run mine --strategy search --search.playouts 32

        entente evaluate --run mine --players newest+search,dumbbot+search,dumbbot --opponents dumbbot --search.years 2
    """
    opponents = [name for words in opponents for name in words.split(",")] if opponents else None
    asked = {"games": games, "measure": measure, "start": start, "years": years, "concurrency": concurrency, "seed": seed}
    match = _match(players, opponents, protocol, {name: value for name, value in asked.items() if value is not None})
    play = how_they_play(temperature, search, strategy)
    if match is not None and (version != NEWEST_VERSION or positions is not None):
        raise InputError(
            "--version and --positions belong to the score on held-out positions, and this is a match: leave them out, and name "
            "versions in --players, as v20"
        )
    if search is not None and strategy != "search" and match is None:
        raise InputError("--search settings are given, but the version does not search: add --strategy search")
    if endpoint is not None and (match is None or not any(is_endpoint(name) for name in (*match.players, match.opponents))):
        raise InputError("--endpoint settings are given, but no endpoint plays: name one, as openai:model@http://host:port/v1")
    if match is not None:
        asks = {"endpoint": endpoint.model_dump()} if endpoint is not None else {}
        match = type(match).model_validate(match.model_dump() | play.model_dump(exclude_unset=True) | asks)
    from entente.evaluation.contestants import check_play_is_used, check_searches, needs_run, resolve_contestants

    names = () if match is None else (*match.players, match.opponents)
    alone = match is not None and run == LATEST and match.start == "standard" and not needs_run(names)
    run = "" if alone else which_run(run, runs_root)
    uses_engine = match is None
    if match is not None:
        contestants = resolve_contestants(match.players, run, runs_root)
        contestants += resolve_contestants((match.opponents,), run, runs_root) if match.opponents else []
        check_play_is_used(contestants, play)
        check_searches(contestants, match)
        uses_engine = any(player.run for player in contestants)
    elif play.strategy == "search":
        from entente.players.search import check_search

        check_search(play.search)
    evaluation = None if alone else evaluation_of(run, runs_root, positions, None if match else opponents, uses_engine)
    from flows.evaluate_policy import evaluate_policy

    score = (evaluation, play) if match is None else (None, None)
    result = run_flow(lambda: evaluate_policy(run, version, runs_root, score[0], match, score[1]))
    _show_score(result) if match is None else _show_match(result)
    if json:
        print_json(result)


def evaluation_of(run: str, runs_root: Path, positions: int | None, opponents: list[str] | None, uses_engine: bool) -> Any:
    """The run's evaluation settings with these overrides. If an engine is used, checks that the model fits in memory."""
    settings = settings_of(RunPaths(runs_root / run))
    wished: dict[str, object] = {}
    if positions is not None:
        wished["positions"] = positions
    if opponents is not None:
        wished["opponents"] = tuple(opponents)
    evaluation = type(settings.evaluation).model_validate(settings.evaluation.model_dump() | wished)
    settings = settings.model_copy(update={"evaluation": evaluation})
    check_settings(settings)
    if uses_engine:
        check_room(settings, trains=False)
    return evaluation


def _match(players: str, opponents: list[str] | None, protocol: str, asked: dict[str, Any]) -> Any:
    if not players and not asked and not protocol:
        return None
    if opponents and len(opponents) > 1:
        raise InputError(f"a match has one kind of opponents in the six other seats, not {len(opponents)}: name one")
    named = tuple(name.strip() for name in players.split(",") if name.strip())
    protocol = protocol or usual_protocol(named, opponents or (), asked)
    against = "".join(opponents or ())
    asked = protocol_match(protocol, named, against, asked) if protocol else asked | {"opponents": against}
    match = MatchSettings.model_validate(({"players": named} if named else {}) | asked)
    if len(match.players) == 1 and not match.opponents:
        raise InputError(f"'{named[0]}' would play only against itself: add --opponents, such as dumbbot, or another player")
    return match


def _show_score(result: dict[str, Any]) -> None:
    for sentence in filter(None, (result["how"], *result["notes"])):
        print(sentence)


def _show_match(result: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title=Text(f"{result['games']} games, {result['how']}"), title_justify="left")
    table.add_column("player", overflow="fold")
    answers = result["answers"]
    for name in ("seats", "centres", "squares", "win", "survival", "solo", "years", *(["default"] if answers else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for player in result["players"]:
        cells = [
            _cell(player["measures"][name], share=name != "centres") for name in ("centres", "sos", "win", "survival", "solo")
        ]
        cells.append(_cell(player["years"], share=False))
        counts = answers.get(player["player"])
        default = [f"{counts['missing'] / max(1, counts['orders']):.1%}" if counts else ""] if answers else []
        table.add_row(cell(player["player"]), str(player["seats"]), *cells, *default)
    Console(width=160).print(table)
    cost = f"; {result['cpu_seconds_a_game']:.3g} CPU seconds per game" if result["cpu_seconds_a_game"] else ""
    print(f"intervals: 95 %; win: most centres, ties split{cost}")
    if result["plot"]:
        print(f"centres by year: {result['plot']}")
    for sentence in result["notes"]:
        print(sentence)


def _cell(estimate: dict[str, Any], *, share: bool) -> str:
    from entente.evaluation.intervals import format_interval

    interval = None if estimate["low"] is None else (estimate["low"], estimate["high"])
    return (
        f"{estimate['mean']:.1%} {format_interval(interval, '.0%')}"
        if share
        else f"{estimate['mean']:.2f} {format_interval(interval, '.2f')}"
    )
