"""Builds a state cache's positions: plays scripted games and freezes a few phases of each.

Plays no policy, writes no file. Equal settings give equal positions in equal order on any machine. Training and held-out
positions share no source game and no board.
"""

import random
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise

from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.game.snapshot import Snapshot, board_key
from entente.telemetry.errors import InputError
from state_cache.sampling import Stratum, stratum_of
from state_cache.settings import CacheSettings

SNAPSHOTS_PER_GAME = 4
"""Positions frozen per game. More are cheaper, but positions of one game are similar."""

HELD_OUT_EVERY = 10
"""One source game in this many is held out, whatever the sizes: a cache of another size holds out the same games."""

MAX_GAMES_WITHOUT_NEW = 200
"""After this many games in a row without a new position the build stops with an error."""

Progress = Callable[[int, int], None]
"""Called with the number of positions frozen so far and wanted."""


def play_source_game(game_index: int, settings: CacheSettings, counts: Counter[Stratum] | None = None) -> list[Snapshot]:
    """Play one scripted game to the last year and freeze a few phases, as `settings.stratify_by` says; `counts` (positions per
    stratum so far) is not changed."""
    seed = _game_seed(game_index, settings)
    rng = random.Random(seed)
    seats = {power: player(rng.choice(settings.players)) for power in POWERS}
    source, game_id = "scripted:" + "+".join(settings.players), f"scripted-{settings.seed}-{game_index:06d}"

    board, frozen = Board.start(), []
    while not board.is_over and board.year <= settings.last_year:
        if board.year >= settings.first_year and board.season + board.phase_type in settings.phases:
            frozen.append(board.snapshot(game_id=game_id, seed=seed, source=source))
        board.step({power: seats[power](legal, rng, board) for power, legal in board.legal_orders().items()})
    if settings.stratify_by == "years":
        return _one_of_each_stretch(frozen, rng)
    return _rarest_strata(frozen, Counter() if counts is None else counts.copy(), rng)


def build(settings: CacheSettings, on_progress: Progress | None = None) -> tuple[list[Snapshot], list[Snapshot]]:
    """Training and held-out positions; raises InputError if the settings do not allow so many different positions."""
    wanted = settings.train_snapshots, settings.held_out_snapshots
    parts: tuple[list[Snapshot], list[Snapshot]] = [], []  # training, held out
    known_boards: set[str] = set()
    counts: tuple[Counter[Stratum], Counter[Stratum]] = Counter(), Counter()
    game_index = games_without_new = 0
    while any(len(part) < count for part, count in zip(parts, wanted, strict=True)):
        held_out = game_index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        missing = wanted[held_out] - len(parts[held_out])
        if missing > 0:
            frozen = play_source_game(game_index, settings, counts[held_out])
            new = [snapshot for snapshot in frozen if board_key(snapshot) not in known_boards][:missing]
            counts[held_out].update(map(stratum_of, new))
            known_boards.update(board_key(snapshot) for snapshot in new)
            parts[held_out].extend(new)
            games_without_new = 0 if new else games_without_new + 1
            if on_progress is not None:
                on_progress(len(parts[0]) + len(parts[1]), sum(wanted))
        if games_without_new >= MAX_GAMES_WITHOUT_NEW:
            raise InputError(
                f"{MAX_GAMES_WITHOUT_NEW} games in a row reached no new position: {len(parts[0])} of {wanted[0]} "
                f"to train from and {len(parts[1])} of {wanted[1]} held out. Widen first_year to last_year, "
                "add 'mover' or 'random' to players, or ask for fewer."
            )
        game_index += 1
    return parts


def _game_seed(game_index: int, settings: CacheSettings) -> int:
    """63 bits, because it is stored as int64. Seeds of different games and cache seeds are independent."""
    # Other words than in schema 4, which divided the games by the sizes: a policy trained there has seen none of these.
    digest = blake2b(f"game {game_index} of cache seed {settings.seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _one_of_each_stretch(frozen: list[Snapshot], rng: random.Random) -> list[Snapshot]:
    """One position from each of SNAPSHOTS_PER_GAME equal parts of the game: early and late years are equally frequent."""
    stretches = min(SNAPSHOTS_PER_GAME, len(frozen))
    edges = [len(frozen) * stretch // stretches for stretch in range(stretches + 1)] if stretches else []
    return [frozen[rng.randrange(low, high)] for low, high in pairwise(edges)]


def _rarest_strata(frozen: list[Snapshot], counts: Counter[Stratum], rng: random.Random) -> list[Snapshot]:
    """Up to SNAPSHOTS_PER_GAME positions, each from the stratum with the fewest positions so far, in the order of play."""
    tie_breaks = [rng.random() for _ in frozen]
    remaining, chosen = list(range(len(frozen))), []
    for _ in range(min(SNAPSHOTS_PER_GAME, len(frozen))):
        rarest = min(remaining, key=lambda index: (counts[stratum_of(frozen[index])], tie_breaks[index]))
        counts[stratum_of(frozen[rarest])] += 1
        remaining.remove(rarest)
        chosen.append(rarest)
    return [frozen[index] for index in sorted(chosen)]
