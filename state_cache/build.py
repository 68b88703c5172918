"""Makes the positions: plays scripted games and freezes a few phases of each.

Promises: the same settings give the same positions in the same order on any machine; training and held-out
positions share no source game and no board. Plays no policy and writes no file.
"""

import random
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise

from game.board import POWERS, Board
from game.players import player
from game.snapshot import Snapshot, board_key
from state_cache.settings import CacheSettings
from state_cache.strata import Stratum, stratum_of
from telemetry.errors import InputError

SNAPSHOTS_PER_GAME = 4
"""Positions frozen in one game: more of them come cheaper, but resemble each other."""

BARREN_GAMES = 200
"""Games in a row without a new position after which the settings are taken to hold no more."""

Progress = Callable[[int, int], None]
"""Called with the positions frozen so far and the positions wanted."""


def play_source_game(game_index: int, settings: CacheSettings, counts: Counter[Stratum] | None = None) -> list[Snapshot]:
    """Play one scripted game to the last year and freeze a few of its phases, as `settings.spread` says.

    `counts` are the positions per stratum so far; they are not changed.
    """
    seed = _game_seed(game_index, settings)
    rng = random.Random(seed)
    seats = {power: player(rng.choice(settings.players)) for power in POWERS}
    source, game_id = "scripted:" + "+".join(settings.players), f"scripted-{settings.seed}-{game_index:06d}"

    board, frozen = Board.start(), []
    while not board.is_over and board.year <= settings.last_year:
        if board.year >= settings.first_year and board.season + board.phase_type in settings.phases:
            frozen.append(board.snapshot(game_id=game_id, seed=seed, source=source))
        board.step({power: seats[power](legal, rng, board) for power, legal in board.legal_orders().items()})
    if settings.spread == "years":
        return _one_of_each_stretch(frozen, rng)
    return _of_the_emptiest_strata(frozen, Counter() if counts is None else counts.copy(), rng)


def build(settings: CacheSettings, on_progress: Progress | None = None) -> tuple[list[Snapshot], list[Snapshot]]:
    """Positions to train from and held-out ones, as many as the settings ask for.

    Raises:
        InputError: the settings do not hold so many different positions.
    """
    wanted = settings.train_snapshots, settings.held_out_snapshots
    sides: tuple[list[Snapshot], list[Snapshot]] = [], []
    known: set[str] = set()
    counts: tuple[Counter[Stratum], Counter[Stratum]] = Counter(), Counter()
    game_index = barren = 0
    while any(len(side) < count for side, count in zip(sides, wanted, strict=True)):
        held_out = _is_held_out(game_index, settings)
        room = wanted[held_out] - len(sides[held_out])
        if room > 0:
            frozen = play_source_game(game_index, settings, counts[held_out])
            new = [snapshot for snapshot in frozen if board_key(snapshot) not in known][:room]
            counts[held_out].update(map(stratum_of, new))
            known.update(board_key(snapshot) for snapshot in new)
            sides[held_out].extend(new)
            barren = 0 if new else barren + 1
            if on_progress is not None:
                on_progress(len(sides[0]) + len(sides[1]), sum(wanted))
        if barren >= BARREN_GAMES:
            raise InputError(
                f"{BARREN_GAMES} games in a row reached no new position: {len(sides[0])} of {wanted[0]} "
                f"to train from and {len(sides[1])} of {wanted[1]} held out. Widen first_year to last_year, "
                "add 'mover' or 'random' to players, or ask for fewer."
            )
        game_index += 1
    return sides


def _game_seed(game_index: int, settings: CacheSettings) -> int:
    """A seed of 63 bits (it is stored as int64); neighbouring games and cache seeds share nothing."""
    digest = blake2b(f"source game {game_index} of cache seed {settings.seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _is_held_out(game_index: int, settings: CacheSettings) -> bool:
    """Spreads the held-out games evenly among the others, at their share of the positions."""
    share = settings.held_out_snapshots / (settings.train_snapshots + settings.held_out_snapshots)
    return int((game_index + 1) * share) > int(game_index * share)


def _one_of_each_stretch(frozen: list[Snapshot], rng: random.Random) -> list[Snapshot]:
    """One position out of each of a few equal stretches, so that early and late years come in equal parts."""
    stretches = min(SNAPSHOTS_PER_GAME, len(frozen))
    edges = [len(frozen) * stretch // stretches for stretch in range(stretches + 1)] if stretches else []
    return [frozen[rng.randrange(low, high)] for low, high in pairwise(edges)]


def _of_the_emptiest_strata(frozen: list[Snapshot], counts: Counter[Stratum], rng: random.Random) -> list[Snapshot]:
    """A few positions, one after another out of the stratum that holds the fewest, in the order of play."""
    lots = [rng.random() for _ in frozen]
    left, chosen = list(range(len(frozen))), []
    for _ in range(min(SNAPSHOTS_PER_GAME, len(frozen))):
        rarest = min(left, key=lambda place: (counts[stratum_of(frozen[place])], lots[place]))
        counts[stratum_of(frozen[rarest])] += 1
        left.remove(rarest)
        chosen.append(rarest)
    return [frozen[place] for place in sorted(chosen)]
