"""The table of a match: means with intervals, and paired differences. A measure is a number for one seat at a game's end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from entente.evaluation.intervals import Estimate, cluster_means, clusters_to_show, estimate, wilson_interval
from entente.evaluation.matches import GAMES_PER_ROUND, GameResult
from entente.evaluation.protocols import part_of_protocol
from entente.evaluation.settings import MatchSettings, Measure
from entente.game.board import POWERS
from entente.game.scores import PowerScores
from entente.players.read_answer import AnswerCounts

MEASURES: dict[Measure, tuple[str, bool, Callable[[PowerScores, PowerScores, str], float]]] = {
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
"""Measure -> its description, whether it is a proportion, and its value for one seat (start, end, power)."""
PAR = 1 / len(POWERS)
"""Expected `win` and `sos` of each of seven equal players."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerResult:
    player: str
    seats: int
    measures: dict[str, Estimate]
    years: Estimate
    by_year: tuple[Estimate, ...]
    """Centres at the end of each year; a finished game keeps its last value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDifference:
    """The match's measure of `player` minus that of `other`, in the same rounds."""

    player: str
    other: str
    difference: Estimate
    games_to_show: int | None
    """Games needed to distinguish a difference of this size and spread from 0; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    games: int
    clusters: int
    players: tuple[PlayerResult, ...]
    pairs: tuple[PairDifference, ...]
    """The first player against every other one."""
    rejected: int
    answers: dict[str, AnswerCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Seat:
    player: str
    cluster: str
    pair: str
    value: dict[str, float]
    by_year: tuple[int, ...]


def match_table(results: Sequence[GameResult], settings: MatchSettings) -> MatchTable:
    clusters = {result.cluster for result in results}
    seats = [seat for result in results for seat in _seats(result)]
    players = tuple(dict.fromkeys(settings.players))
    player_results = tuple(_player_result(player, seats, settings) for player in players)
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
    if settings.start == "held-out":
        return "source games"
    return "rounds" if pairs and not settings.opponents else "games"


def conclusions(table: MatchTable, match: MatchSettings) -> list[str]:
    sentences = [part_of_protocol(match)] if part_of_protocol(match) else []
    sentences += [f"{name}: {counts.sentence}" for name, counts in table.answers.items()]
    for pair in table.pairs:
        interval = pair.difference.describe("+.3f", cluster_noun(match, pairs=True))
        figures = f"by {pair.difference.mean:+.3f} ({match.measure}), {interval}"
        if pair.difference.excludes_zero:
            word = "better" if pair.difference.mean > 0 else "worse"
            sentences.append(f"{pair.player} plays {word} than {pair.other}: {figures}")
        else:
            enough = f"; about {pair.games_to_show:,} games would show one of this size" if pair.games_to_show else ""
            sentences.append(f"no difference between {pair.player} and {pair.other} is shown: {figures}{enough}")
    return sentences


def _whole_rounds(games: float) -> int:
    return max(1, math.ceil(games / GAMES_PER_ROUND - 1e-9)) * GAMES_PER_ROUND


def _seats(result: GameResult) -> list[_Seat]:
    start, end = PowerScores(centres=result.start), PowerScores(centres=result.centres)
    return [
        _Seat(
            result.seats[power],
            result.cluster,
            result.pair,
            {name: measure(start, end, power) for name, (_, _, measure) in MEASURES.items()},
            tuple(centres[POWERS.index(power)] for centres in result.by_year),
        )
        for power in result.measured
    ]


def _player_result(player: str, seats: Sequence[_Seat], settings: MatchSettings) -> PlayerResult:
    own = [seat for seat in seats if seat.player == player]
    clusters = [seat.cluster for seat in own]
    measures = {}
    for name, (_, share, _) in MEASURES.items():
        values = [seat.value[name] for seat in own]
        measures[name] = estimate(values, clusters, settings.seed, share=share)
    longest = max(len(seat.by_year) for seat in own)
    return PlayerResult(
        player=player,
        seats=len(own),
        measures=measures,
        years=estimate([len(seat.by_year) for seat in own], clusters, settings.seed),
        by_year=tuple(
            estimate([seat.by_year[min(year, len(seat.by_year) - 1)] for seat in own], clusters, settings.seed)
            for year in range(longest)
        ),
    )


def _difference(other: str, seats: Sequence[_Seat], settings: MatchSettings) -> PairDifference:
    """Paired by game (same start and random numbers); the bootstrap resamples whole clusters of pairs."""
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
    found = estimate(differences, clusters, settings.seed)
    if MEASURES[settings.measure][1] and found.interval and not any(differences):  # as for equal shares: Wilson's end, either way
        most = wilson_interval(0, found.clusters)[1]
        found = replace(found, low=-most, high=most)
    return PairDifference(
        player=first,
        other=other,
        difference=found,
        games_to_show=None if needed is None else _whole_rounds(needed * games_of_one),
    )
