"""The table of a match from its results: means with intervals, paired differences, ratings.

A measure belongs to one seat at the end of one game. "Win" is `Standing.win_share`: most centres, ties share the win.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator

from evaluation.intervals import Estimate, cluster_means, clusters_for_width, clusters_to_show, estimate
from evaluation.matches import GAMES_PER_ROUND, GameResult
from evaluation.settings import MatchSettings, Measure
from game.board import POWERS
from game.scores import Standing
from outside.reading import AnswerCounts

MEASURES: dict[Measure, tuple[str, bool, Callable[[Standing, Standing, str], float]]] = {
    "centres": ("mean supply centres at the end", False, lambda start, end, power: float(end.centres[POWERS.index(power)])),
    "gained": (
        "mean centres gained since the start",
        False,
        lambda start, end, power: float(end.centres[POWERS.index(power)] - start.centres[POWERS.index(power)]),
    ),
    "sos": ("share of the sum of squared centres", True, lambda start, end, power: end.sos_share(power)),
    "win": ("share of wins: most centres, ties split", True, lambda start, end, power: end.win_share(power)),
    "survival": ("share of games in which it owned a centre at the end", True, lambda start, end, power: end.survival(power)),
    "solo": ("share of games won alone, with 18 centres or more", True, lambda start, end, power: end.solo(power)),
}
"""Measure -> its description, whether it is a share, and its value for one seat (start, end, power)."""
PAR = 1 / len(POWERS)
"""Share of wins, and of the sum of squares, of each of seven equal players."""


_Rating = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""NaN where one player alone was measured; a file has null for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerResult:
    """One player over all its seats of a match."""

    player: str
    seats: int
    """Number of measured seats."""
    measures: dict[str, Estimate]
    rating: _Rating
    """OpenSkill's mu (Plackett-Luce); a new player has 25. NaN if the match has one player."""
    rating_spread: _Rating
    """OpenSkill's sigma; a new player has 8.33."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDifference:
    """Difference of the match's measure between `player` and `other` in the same rounds."""

    player: str
    other: str
    difference: Estimate
    games_to_show: int | None
    """Games needed to separate a difference of this size and spread from 0; None if it is unknown."""

    @property
    def shown(self) -> bool:
        """True if there is an interval and it excludes 0."""
        return self.difference.excludes_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    """The result of a match."""

    games: int
    clusters: int
    players: tuple[PlayerResult, ...]
    pairs: tuple[PairDifference, ...]
    """Every other player compared with the first."""
    rejected: int
    answers: dict[str, AnswerCounts] = field(default_factory=dict)
    """Endpoint -> how it answered in all games; empty if none played."""

    @property
    def answer_sentences(self) -> list[str]:
        """How each endpoint answered."""
        return [f"{name}: {counts.sentence}" for name, counts in self.answers.items()]


@dataclass(frozen=True, slots=True)
class _Seat:
    player: str
    cluster: str
    pair: str
    value: dict[str, float]


def match_table(results: Sequence[GameResult], settings: MatchSettings) -> MatchTable:
    """The table of a match."""
    clusters = {result.cluster for result in results}
    seats = [seat for result in results for seat in _seats(result)]
    players = tuple(dict.fromkeys(settings.players))
    ratings = rate_players(results, players) if len(players) > 1 else {}
    player_results = tuple(_player_result(player, seats, settings, ratings.get(player)) for player in players)
    pairs = tuple(_difference(other, seats, settings) for other in players[1:])
    return MatchTable(
        games=len(results),
        clusters=len(clusters),
        players=player_results,
        pairs=pairs,
        rejected=sum(result.rejected for result in results),
        answers=_answers(results),
    )


def _answers(results: Sequence[GameResult]) -> dict[str, AnswerCounts]:
    names = sorted({name for result in results for name in result.answers})
    none = AnswerCounts()
    return {name: sum((result.answers.get(name, none) for result in results), none) for name in names}


def cluster_noun(settings: MatchSettings, *, pairs: bool = False) -> str:
    """The plural noun for clusters of the players' figures, or with `pairs` of the difference between two players."""
    if settings.start == "held-out":
        return "source games"
    return "rounds" if pairs and not settings.opponents else "games"


def cluster_means_by_player(results: Sequence[GameResult], settings: MatchSettings) -> dict[str, list[float]]:
    """Means of the match's measure by cluster, for each player."""
    seats = [seat for result in results for seat in _seats(result)]
    found = {}
    for player in dict.fromkeys(settings.players):
        own = [seat for seat in seats if seat.player == player]
        values, clusters = [seat.value[settings.measure] for seat in own], [seat.cluster for seat in own]
        found[player] = list(cluster_means(values, clusters).values())
    return found


def games_for_width(results: Sequence[GameResult], settings: MatchSettings) -> int:
    """Games needed so that the widest of the players' intervals is about `settings.width`, from the spread in `results`."""
    clusters = max(clusters_for_width(means, settings.width) for means in cluster_means_by_player(results, settings).values())
    return _whole_rounds(clusters * _games_of_a_cluster(results))


def _games_of_a_cluster(results: Sequence[GameResult]) -> float:
    """Games that each player plays per cluster."""
    return len({result.pair for result in results}) / len({result.cluster for result in results})


def _whole_rounds(games: float) -> int:
    return max(1, math.ceil(games / GAMES_PER_ROUND - 1e-9)) * GAMES_PER_ROUND


def _seats(result: GameResult) -> list[_Seat]:
    start, end = Standing(centres=result.start), Standing(centres=result.centres)
    return [
        _Seat(
            result.seats[power],
            result.cluster,
            result.pair,
            {name: measure(start, end, power) for name, (_, _, measure) in MEASURES.items()},
        )
        for power in result.measured
    ]


def _player_result(
    player: str, seats: Sequence[_Seat], settings: MatchSettings, rating: tuple[float, float] | None
) -> PlayerResult:
    own = [seat for seat in seats if seat.player == player]
    clusters = [seat.cluster for seat in own]
    measures = {}
    for name, (_, share, _) in MEASURES.items():
        values = [seat.value[name] for seat in own]
        measures[name] = estimate(values, clusters, settings.seed, share=share)
    mu, sigma = rating or (float("nan"), float("nan"))
    return PlayerResult(player=player, seats=len(own), measures=measures, rating=mu, rating_spread=sigma)


def _difference(other: str, seats: Sequence[_Seat], settings: MatchSettings) -> PairDifference:
    """Difference to the first player, paired by game (same start and random numbers); whole clusters of pairs are resampled."""
    first = settings.players[0]
    values: dict[str, dict[str, list[float]]] = {first: {}, other: {}}
    cluster_of: dict[str, str] = {}
    for seat in seats:
        if seat.player in values:
            # At one table the pair is the round, because each player plays every power in its seven games.
            key = seat.pair if settings.opponents else seat.pair.split("/")[0]
            values[seat.player].setdefault(key, []).append(seat.value[settings.measure])
            cluster_of[key] = seat.cluster if settings.opponents or settings.start == "held-out" else key
    both = [key for key in values[first] if key in values[other]]
    differences = [float(np.mean(values[first][key]) - np.mean(values[other][key])) for key in both]
    clusters = [cluster_of[key] for key in both]
    needed = clusters_to_show(list(cluster_means(differences, clusters).values()))
    games_of_one = len({seat.pair for seat in seats}) / len(set(clusters))
    return PairDifference(
        player=first,
        other=other,
        difference=estimate(differences, clusters, settings.seed),
        games_to_show=None if needed is None else _whole_rounds(needed * games_of_one),
    )


def rate_players(results: Sequence[GameResult], players: Sequence[str]) -> dict[str, tuple[float, float]]:
    """OpenSkill's mu and sigma of each player, updated game by game (Weng & Lin 2011, Plackett-Luce).

    A game ranks its players by the mean centres of their seats; equal means are ties. If each player sits alone against the
    same opponents, the games of one pair count as one game: they have the same start, power and random numbers.
    """
    from openskill.models import PlackettLuce

    model = PlackettLuce()
    ratings = {player: model.rating(name=player) for player in players}
    for meeting in _meetings(results):
        present = [player for player in players if player in meeting]
        if len(present) > 1:
            teams = [[ratings[player]] for player in present]
            rated = model.rate(teams, scores=[meeting[player] for player in present])
            ratings |= {player: team[0] for player, team in zip(present, rated, strict=True)}
    return {player: (float(rating.mu), float(rating.sigma)) for player, rating in ratings.items()}


def _meetings(results: Sequence[GameResult]) -> list[Mapping[str, float]]:
    """Mean centres of each player's seats, by pair."""
    found: dict[str, dict[str, list[int]]] = {}
    for result in results:
        for power in result.measured:
            centres_by_player = found.setdefault(result.pair, {})
            centres_by_player.setdefault(result.seats[power], []).append(result.centres[POWERS.index(power)])
    return [{player: float(np.mean(centres)) for player, centres in pair.items()} for pair in found.values()]
