"""The result card of a stored match, and which models of this machine are the players that a card names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from decoding.model_files import file_hash, recipe_prompts, weights_hash
from evaluation.adapter_folders import adapter_prompts
from evaluation.contestants import Contestant, resolve_contestant
from evaluation.match_files import read_games, read_match
from evaluation.matches import plan_match
from evaluation.result_card import CardPlayer, ResultCard, make_card
from game.players import SEARCHES
from game.snapshot import Snapshot
from inference.choose_engine import engine_here
from pipeline.plans.find_model import model_of
from pipeline.run_settings import MODEL_FOLDER, settings_of
from pipeline.shared_cache import find_shared_cache
from records.policy_version import BASE_HASH
from state_cache.store import open_cache
from storage.runs import RunPaths, matches_folder, runs_in
from telemetry.errors import EntenteError, InputError

_FOLDERS = ("models", "exported")
"""Folders of the working folder whose models and adapters are tried, beside those in the folder of runs."""


def card_of_match(label: str, run: str, runs_root: Path) -> ResultCard:
    """The card of a match that was played.

    Args:
        run: its run; empty: it needs none.

    Raises:
        InputError: nobody could repeat it, or a model of it is no longer on this machine.
    """
    folder = matches_folder(run, runs_root)
    record, games = read_match(folder / f"{label}.json"), read_games(folder, label)
    held_out: Sequence[Snapshot] = ()
    if record.settings.start == "held-out":
        cache = find_shared_cache(runs_root, settings_of(RunPaths(runs_root / run)).cache)
        if cache is None:
            raise InputError(f"the state cache of run '{run}' is gone, so its positions cannot be put on a card: build it again")
        held_out = open_cache(cache).held_out
    players = [card_player(player, runs_root) for player in record.players]
    per_round = len(plan_match(record.settings, 1, held_out))
    return make_card(record.settings, games, players, record.environments, record.table.games // per_round, held_out)


def card_player(player: Contestant, runs_root: Path) -> CardPlayer:
    """What a card says of a player.

    Raises:
        InputError: the base model of its run is no longer on this machine.
    """
    if not player.is_policy:
        return CardPlayer(name=player.name)
    if player.model is None:
        settings = settings_of(RunPaths(runs_root / player.run))
        base, prompts = model_of(settings, runs_root, player.run), settings.prompts
        inference = settings.inference.for_evaluation
        engine = "inference workers" if inference.urls else engine_here(inference)[0]
    else:
        base, engine = player.model, "torch"  # see flows/open_players.model_inference
        prompts = recipe_prompts(base) if player.adapter is None else adapter_prompts(player.adapter, base)
    return CardPlayer(
        name=player.name,
        run=player.run,
        version=player.version,
        adapter="" if player.adapter is None or player.adapter_hash == BASE_HASH else player.adapter_hash,
        weights=weights_hash(base),
        tokenizer=file_hash(base / "tokenizer.json"),
        prompts=prompts,
        engine=engine,
    )


def find_card_players(
    wanted: Sequence[CardPlayer], given: Mapping[str, str], runs_root: Path
) -> tuple[list[Contestant], list[str]]:
    """The card's players on this machine, and sentences on what draws for them otherwise than when the card was made.

    Args:
        given: player's name in the card, without '+search' -> what plays it here, as `entente evaluate --players` names it.

    Raises:
        InputError: `given` names no player of the card, or one has other weights, tokenizer or prompts; or none was found.
    """
    plain = {player.name.removesuffix(SEARCHES): player for player in wanted}
    if unknown := next((name for name in given if name not in plain), ""):
        raise InputError(f"the card has no player '{unknown}': its players are {', '.join(plain)}")
    found, notes = dict[str, Contestant](), list[str]()
    for name, player in plain.items():
        if not player.weights:
            found[name] = resolve_contestant(name, "", runs_root)
            continue
        here = _given(player, name, given[name], runs_root) if name in given else _search(player, name, runs_root)
        found[name], engine = here
        if engine != player.engine:
            notes.append(f"'{name}' was drawn by {player.engine}, here by {engine}")
    searching = [player.name.endswith(SEARCHES) for player in wanted]
    return [
        replace(found[player.name.removesuffix(SEARCHES)], name=player.name, searches=searches)
        for player, searches in zip(wanted, searching, strict=True)
    ], notes


def _given(player: CardPlayer, name: str, named: str, runs_root: Path) -> tuple[Contestant, str]:
    contestant = resolve_contestant(named, "", runs_root)
    here = card_player(contestant, runs_root)
    if here.identity != player.identity:
        parts = ("adapter", "weights", "tokenizer", "prompts")
        different = [part for part in parts if getattr(here, part) != getattr(player, part)]
        raise InputError(f"'{named}' is not the card's player '{name}': it has other {' and other '.join(different)}")
    return contestant, here.engine


def _search(player: CardPlayer, name: str, runs_root: Path) -> tuple[Contestant, str]:
    for candidate in dict.fromkeys(_candidates(player, name, runs_root)):
        try:
            contestant = resolve_contestant(candidate, "", runs_root)
            here = card_player(contestant, runs_root)
        except (EntenteError, OSError):  # a folder that is no model, or a version that is gone: it is not the one
            continue
        if here.identity == player.identity:
            return contestant, here.engine
    what = f"adapter {player.adapter[:12]}, base {player.weights[:12]}" if player.adapter else f"weights {player.weights[:12]}"
    raise InputError(
        f"no model here is the card's player '{name}' ({what}): name its folder, as --players {name}=models/small, or a "
        f"version, as --players {name}=mine:v20"
    )


def _candidates(player: CardPlayer, name: str, runs_root: Path) -> Iterator[str]:
    """What may be the player, likely ones first."""
    version = f"v{player.version}"
    yield name if "/" in name else f"{player.run}:{version}"
    yield from (f"{paths.root.name}:{version}" for paths in reversed(runs_in(runs_root)))
    for folder in (*map(Path, _FOLDERS), runs_root / MODEL_FOLDER):
        for each in sorted(folder.iterdir()) if folder.is_dir() else ():
            yield f"./{each}" if not each.is_absolute() else str(each)
