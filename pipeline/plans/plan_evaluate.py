"""Plans of measurements: a version's score, and matches. Nothing is played, started or written here."""

from pathlib import Path

from evaluation.adapter_folders import check_weights
from evaluation.contestants import resolve_contestants
from evaluation.match_files import match_label, read_games
from evaluation.matches import DEFAULT_GAMES, GAMES_PER_ROUND, rounds_for
from evaluation.settings import EvaluationSettings, MatchSettings, PlaySettings
from inference.memory_plan import check_memory, this_machine
from pipeline.plans.plan_memory import memory_forecast
from pipeline.plans.plan_run import (
    Forecast,
    cache_line,
    engine_forecast,
    evaluation_forecast,
    free_bytes,
    model_line,
    prefect_forecast,
    run_model,
)
from pipeline.run_cards import run_cards
from pipeline.run_settings import settings_of
from pipeline.shared_cache import find_shared_cache
from pipeline.threads import usable_cores
from storage.adapters import published_versions
from storage.run_roots import as_given
from storage.runs import RunPaths, matches_folder
from telemetry.errors import InputError


def plan_evaluate(run: str, version: int, runs_root: Path, evaluation: EvaluationSettings, play: PlaySettings) -> Forecast:
    """The plan of scoring `version` of `run`.

    Raises:
        InputError: no such version or model, or too little memory.
    """
    versions = [0, *published_versions(RunPaths(runs_root / run))]
    version = versions[-1] if version == -1 else version
    if version not in versions:
        raise InputError(f"run '{run}' has no policy version {version}; its newest is {versions[-1]}")
    settings = settings_of(RunPaths(runs_root / run)).model_copy(update={"runs_root": runs_root, "evaluation": evaluation})
    cards = run_cards(settings, trains=False)
    model, shape = run_model(settings)
    machine = this_machine(cards)
    check_memory(shape, settings.inference, machine=machine)
    cache = find_shared_cache(runs_root, settings.cache)
    return {
        "command": "evaluate",
        "run": {"name": run, "folder": as_given(runs_root / run), "policy_version": version},
        "evaluation": evaluation_forecast(settings.evaluation, times=1, scripted=0),
        "play": {"temperature": play.temperature, "pick": play.pick},
        **_search(play, searches=play.pick == "search"),
        "memory": memory_forecast(shape, settings.inference, machine, 0),
        "threads": {"cores": usable_cores(), "engine": max(settings.threads)},
        "engine": engine_forecast(settings.inference, cards),
        "reused_or_made": {"state_cache": cache_line(cache, settings), "model": model_line(model, settings)},
        "prefect": prefect_forecast(),
    }


def plan_match(run: str, runs_root: Path, match: MatchSettings) -> Forecast:
    """The plan of a match; `run` is empty if no version of a run plays.

    Raises:
        InputError: a player cannot play.
        DataError: an adapter from outside is damaged, or no engine can serve it.
    """
    players = resolve_contestants(match.players, run, runs_root)
    others = resolve_contestants((match.opponents,), run, runs_root) if match.opponents else []
    everybody = [*players, *(other for other in others if other.name not in [player.name for player in players])]
    for player in everybody:
        if player.model is not None and player.adapter is not None:
            check_weights(player.policy, player.model)
    resolved = match.model_copy(
        update={"players": tuple(player.name for player in players), "opponents": others[0].name if others else ""}
    )
    label, folder = match_label(resolved, everybody), matches_folder(run, runs_root)
    # With a wanted width the number of games follows from the games played so far, or from a pilot.
    each = rounds_for(match.games or DEFAULT_GAMES) * GAMES_PER_ROUND
    games = {"games": each * len(players), "games_of_each_player": each} if others else {"games": each}
    return {
        "command": "evaluate",
        "match": {
            **({"protocol": match.protocol} if match.protocol else {}),
            "players": ", ".join(resolved.players),
            "seats": f"one against six of '{resolved.opponents}'" if others else "all players at one table",
            "start": "spring 1901" if match.start == "standard" else "held-out positions",
            "years_at_most": match.years,
            **({"games": f"as many as an interval of {match.width:g} takes"} if match.width else games),
            "games_already_there": len(read_games(folder, label)),
            "measure": match.measure,
            "temperature": match.temperature,
            "repetitions": match.repetitions,
            "seed": match.seed,
        },
        **_search(match, searches=any(player.searches_by(match) for player in everybody)),
        **({"outside": match.outside.model_dump(mode="json")} if any(player.is_endpoint for player in everybody) else {}),
        "engines": {"serve": ", ".join(player.name for player in everybody if player.is_policy) or "none is needed"},
        "disk": {"files": str(folder / f"{label}.*"), "free_bytes": free_bytes(runs_root)},
        "threads": {"cores": usable_cores()},
        "prefect": prefect_forecast(),
    }


def _search(play: PlaySettings, *, searches: bool) -> Forecast:
    if not searches:
        return {}
    shown = play.search.model_dump(mode="json")
    return {"search": {name: ", ".join(value) or "none" if isinstance(value, list) else value for name, value in shown.items()}}
