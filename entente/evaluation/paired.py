"""Two scores compared position by position.

With equal settings scores share positions, powers, opponents and seeds, so differences are computed fork by fork, without the
variance of positions. The bootstrap resamples whole source games (`entente.evaluation.intervals`).
"""

from dataclasses import dataclass

from entente.evaluation.intervals import Estimate, cluster_means, clusters_to_show, estimate
from entente.evaluation.score_files import ScoreRecord
from entente.evaluation.settings import SCORE_SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDifference:
    difference: Estimate
    """Centres."""
    forks: int
    """Starts that both played."""
    forks_to_show: int | None
    """Starts needed to distinguish a difference of this size and spread from 0; None if unknown."""


def score_difference(first: ScoreRecord, second: ScoreRecord) -> ScoreDifference | str:
    """The second score minus the first, over the common starts; or the reason why they cannot be paired."""
    ours, theirs = first.settings.question, second.settings.question
    for what, one, other in (
        ("opponents", first.opponents, second.opponents),
        ("horizons in years", ours.horizon_years, theirs.horizon_years),
    ):
        if one != other:
            return f"they were measured with other {what}, {one} and {other}"
    if first.code != second.code:
        return "they were measured with programs that may play differently"
    if not (first.score.gains and second.score.gains):
        return "one of them has no gains of single positions"
    gains = [{(gain.snapshot_id, gain.power): gain for gain in record.score.gains} for record in (first, second)]
    both = [key for key in gains[0] if key in gains[1]]
    if not both:
        return "they have no position in common"
    differences = [gains[1][key].centres - gains[0][key].centres for key in both]
    games = [gains[0][key].game_id for key in both]
    needed = clusters_to_show(list(cluster_means(differences, games).values()))
    return ScoreDifference(
        difference=estimate(differences, games, SCORE_SEED),
        forks=len(both),
        forks_to_show=None if needed is None else round(needed * len(both) / len(set(games))),
    )
