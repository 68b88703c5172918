"""The card of a published model: what it is, how strong it was measured, how to use it and how to make it again.

All figures come from the recipe and from files of matches and scores.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from evaluation.contestants import needs_run
from evaluation.intervals import describe_interval, format_interval
from evaluation.match_files import MatchRecord
from evaluation.match_table import MEASURES
from evaluation.score_files import ScoreRecord
from evaluation.settings import MatchSettings
from game.players import SEARCHES
from search.settings import SearchSettings

CARD = "README.md"
_SHOWN = ("centres", "sos", "win", "survival", "solo")
_FLAGS = ("start", "years", "measure", "temperature", "repetitions", "pick")


def model_card(
    name: str,
    recipe: Mapping[str, Any],
    matches: Sequence[tuple[MatchRecord, str]],
    scores: Sequence[ScoreRecord],
    *,
    has_curve: bool,
) -> str:
    """The card in Markdown.

    Args:
        name: the model's folder as a player, such as 'models/small'.
        recipe: of the published model.
        matches: with the model's name in each, which `name` replaces.
    """
    return card_template("model_card.md.jinja").render(
        name=name,
        title=name.rpartition("/")[2],
        recipe=recipe,
        settings=recipe["settings"],
        teachers=recipe["settings"].get("teachers"),
        recorded=recipe["settings"].get("recorded"),
        training=recipe.get("training"),
        last=(recipe.get("curve") or [None])[-1],
        matches=[match_figures(record, known_as, name) for record, known_as in matches],
        scores=[score_in_words(record) for record in scores],
        has_curve=has_curve,
    )


def card_template(name: str) -> Template:
    """The template of a card."""
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).get_template(name)


def match_figures(record: MatchRecord, known_as: str, name: str) -> dict[str, Any]:
    """What `figures.md.jinja` shows of a match; `name` replaces the name that the model has there."""
    settings, table = record.settings, record.table

    def renamed(player: str) -> str:
        return name + player.removeprefix(known_as) if player.removesuffix(SEARCHES) == known_as else player

    rows = []
    for result in table.players:
        cells = []
        for measure in _SHOWN:
            form = ".1%" if MEASURES[measure][1] else ".2f"
            found = result.measures[measure]
            cells.append(f"{found.mean:{form}} {format_interval(found.interval, form)}")
        rows.append([renamed(result.player), *cells])
    players = [renamed(player) for player in settings.players]
    opponents = renamed(settings.opponents) if settings.opponents else ""
    return {
        "games": table.games,
        "seats": f"one seat against six of {opponents}" if opponents else "all players at one table",
        "start": "spring 1901" if settings.start == "standard" else "held-out positions",
        "years": settings.years,
        "how": settings.how((*players, opponents)),
        "rows": rows,
        "command": _command(settings, players, opponents, table.games),
    }


def _command(settings: MatchSettings, players: Sequence[str], opponents: str, games: int) -> str:
    """The command that plays the match again; empty if it needs a run, which no clone has."""
    everybody = (*players, opponents)
    of_a_run = needs_run(everybody) or any(":" in each for each in everybody)
    if of_a_run or settings.start != "standard" or settings.seed != MatchSettings().seed:
        return ""
    words = ["entente", "evaluate", "--players", ",".join(players)]
    words += ["--opponents", opponents] if opponents else []
    words += ["--games", str(games // len(players) if opponents else games)]
    plain, usual = settings.model_dump(mode="json"), MatchSettings().model_dump(mode="json")
    words += [word for flag in _FLAGS if plain[flag] != usual[flag] for word in (f"--{flag}", str(plain[flag]))]
    if settings.pick == "search" or any(each.endswith(SEARCHES) for each in (*players, opponents)):
        search, default = plain["search"], SearchSettings().model_dump(mode="json")
        for flag, value in search.items():
            if value != default[flag]:
                words += [f"--search.{flag}", ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def score_in_words(record: ScoreRecord) -> str:
    """A score with its interval, as the end of a sentence."""
    score = record.score
    found = describe_interval(score.estimate.interval, score.source_games, "+.2f", "source games")
    years = record.settings.horizon_years
    return f"{score.mean:+.2f} centres in {years} game year{'s' * (years > 1)} against {record.opponents}, {found}"
