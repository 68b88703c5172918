"""Plays games of a result card again, and says where they differ. It needs no Prefect server, and no run if no version plays.

Games that were played again are kept until the verification ends, so an interrupted one goes on where it was. A new verification
of the same card plays them again.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evaluation.contestants import Contestant, check_searches
from evaluation.match_files import append_game, read_games
from evaluation.matches import GameResult, play_match
from evaluation.result_card import ResultCard, first_different_phase, sampled_games
from flows.open_players import open_players
from storage.runs import CARD_FOLDER
from telemetry.progress import reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What playing games of a card again showed."""

    games: int
    """Games played again."""
    seed: int
    """Of the choice of the games."""
    different: dict[str, str]
    """Game -> the first phase in which it differs, or 'the end'; empty if all are equal."""


async def verify_card(
    card: ResultCard, players: Sequence[Contestant], runs_root: Path, environment: dict[str, str], share: float, seed: int | None
) -> Verification:
    """Play `share` of the card's games again.

    Args:
        players: the card's players as they are on this machine.
        environment: facts about this machine; a verification that was interrupted under others begins anew.
        seed: chooses the games; None: the one of an interrupted verification, else a new one.

    Raises:
        InputError, EngineError: the players cannot play, or a game failed.
    """
    check_searches(players, card.settings)
    folder = runs_root / CARD_FOLDER
    here = json.dumps([card.checksum, environment, [asdict(player) for player in players]], sort_keys=True, default=str)
    label = f"{hashlib.sha256(here.encode()).hexdigest()[:16]}-{share:g}"
    if seed is None:
        begun = sorted(folder.glob(f"{label}-*.jsonl"))
        seed = int(begun[0].stem.rpartition("-")[2]) if begun else secrets.randbelow(10**6)
    label = f"{label}-{seed}"
    plans = card.plans()
    chosen = sampled_games(card, share, seed)
    played = read_games(folder, label)
    if played:
        reporter().say(f"{len(played)} games were played again before; the verification goes on")
    missing = [plans[index] for index in chosen if plans[index].key not in played]

    def on_game(game: GameResult) -> None:
        played[game.key] = game
        append_game(folder, label, game)
        reporter().stage("playing games again", len(played), len(chosen))

    if missing:
        async with open_players(players, runs_root, card.settings) as opened:
            await opened.host.run(play_match(missing, card.settings, opened.deciders, on_game))
    compared = {plans[index].key: first_different_phase(card.games[index], played[plans[index].key]) for index in chosen}
    (folder / f"{label}.jsonl").unlink()
    return Verification(games=len(chosen), seed=seed, different={key: phase for key, phase in compared.items() if phase})
