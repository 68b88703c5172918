"""Says what a match found."""

from evaluation.match_files import MatchRecord
from evaluation.match_table import cluster_noun


def describe_match(record: MatchRecord) -> str:
    """The players of a match, and which of their differences the figures show."""
    asked, table = record.settings, record.table
    where = "the standard start" if asked.start == "standard" else "held-out positions"
    seats = f", a seat each against six of {asked.opponents}" if asked.opponents else ", at one table"
    how = asked.how((*asked.players, asked.opponents))
    head = f"{table.games} games of {asked.years} years from {where}{seats}; {how}{'; ' if how else ''}"
    head += f"intervals resample whole {cluster_noun(asked)}, {table.clusters} in all."
    for pair in table.pairs:
        difference = pair.difference
        interval = difference.describe("+.3f", cluster_noun(asked, pairs=True)).removeprefix("95 % interval ")
        need = f"; about {pair.games_to_show:,} games would show it" if pair.games_to_show and not pair.shown else ""
        head += f" {pair.player} against {pair.other}: {difference.mean:+.3f} {interval}{', shown' if pair.shown else need}."
    return " ".join([head, *(f"{sentence}." for sentence in table.answer_sentences)])
