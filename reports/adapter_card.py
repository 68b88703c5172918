"""The card of an exported version: what it is, how it was trained, how strong the run measured it, and how to load it.

All figures come from the recipe and from the run's files of scores and matches.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluation.contestants import Contestant
from evaluation.match_files import MatchRecord, read_matches
from evaluation.score_files import ScoreRecord, read_score
from evaluation.strength import POLICY
from game.players import SEARCHES
from records.policy_version import BASE_VERSION
from reports.model_card import card_template, match_figures, score_in_words
from storage.runs import RunPaths

_SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's max_lora_rank may have."""


def adapter_card(name: str, recipe: Mapping[str, Any], run: RunPaths, version: Contestant, *, merged: bool) -> str:
    """The card in Markdown, with the metadata that a hub reads at its head.

    Args:
        name: of the folder.
        recipe: of the export.
        merged: the folder holds whole weights.

    Raises:
        DataError: a score or a match of the run is damaged.
    """
    matches = list(_matches(run, version))
    return card_template("adapter_card.md.jinja").render(
        name=name,
        recipe=recipe,
        merged=merged,
        rank=next(rank for rank in _SLOT_RANKS if rank >= recipe["lora"]["r"]),
        scores=[score_in_words(score) for score in _scores(run, version.version)],
        base_scores=[score_in_words(score) for score in _scores(run, BASE_VERSION)],
        matches=[match_figures(match, known_as, known_as) for match, known_as in matches],
    )


def _scores(run: RunPaths, version: int) -> Iterator[ScoreRecord]:
    """Scores of the version, one for each question."""
    asked = []
    for file in sorted((*run.scores.glob("*.json"), *run.scores.glob("track/*.json"))):
        found = read_score(run, file.relative_to(run.scores).with_suffix("").as_posix())
        if found is not None and (found.player, found.policy_version) == (POLICY, version):
            question = found.opponents, found.settings.question
            if question not in asked:
                asked.append(question)
                yield found


def _matches(run: RunPaths, version: Contestant) -> Iterator[tuple[MatchRecord, str]]:
    """Matches of the run that measured the version, each with its name there."""
    for match in read_matches(run.matches):
        for player in match.players:
            is_it = (player.run, player.adapter_hash) == (version.run, version.adapter_hash)
            if is_it and player.name in match.settings.players:
                yield match, player.name.removesuffix(SEARCHES)
                break
