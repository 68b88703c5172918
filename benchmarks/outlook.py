"""How well each measure of a position foretells the end of a whole game: the component `outlook` beside what the board shows.

Seven DumbBots play to a solo or the end of 1920. At each spring from 1903 to 1906 the measures are taken for all powers. The
figure is Pearson's correlation with the power's share of squared centres at the end, over games, springs and powers. The end of
a game has luck that nothing foretells, so even the mean of very many playouts to 1920 stays below 1.
"""

import numpy as np

from benchmarks.outcome import Outcome, Target, check_rounds, timed
from entente.game.board import POWERS, Board
from entente.game.players import player
from entente.game.scores import compute_standing
from entente.players.playouts import outlook
from entente.players.search_settings import OutlookSettings
from entente.players.seeds import dice
from entente.telemetry.progress import reporter

YEARS = (1, 2, 3, 5, 8)
PLAYOUTS = 16
SPRINGS = ("S1903M", "S1904M", "S1905M", "S1906M")
LAST_YEAR = 1920


def bench_outlook(*, games: int, seed: int) -> Outcome:
    """Correlations of the measures at hand, and of `outlook` by years and number of playouts; CPU milliseconds of a playout."""
    check_rounds(games)
    measures: dict[str, list[float]] = {}
    ends: list[float] = []
    spent = dict.fromkeys(YEARS, 0.0)
    for game in range(games):
        boards, end = _play(f"outlook/{seed}/{game}")
        for board in boards:
            ends += end
            now = compute_standing(board)
            measures.setdefault("centres now", []).extend(map(float, now.centres))
            measures.setdefault("squares now", []).extend(map(now.sos_share, POWERS))
            for years in YEARS:
                name = f"{game}/{board.phase}/from/{years}"
                seconds, found = timed(lambda years=years, name=name, board=board: _outlooks(board, name, years))
                spent[years] += seconds
                for playouts in (1, 4, PLAYOUTS):
                    means = np.mean(found[:playouts], axis=0)
                    measures.setdefault(f"outlook {years} years {playouts} playouts", []).extend(means.tolist())
            board.release()
        reporter().stage("whole games", game + 1, games)
    figures = {f"{name} correlation": float(np.corrcoef(values, ends)[0, 1]) for name, values in measures.items()}
    count = max(1, len(ends) // len(POWERS)) * PLAYOUTS
    figures |= {f"a playout of {years} years, CPU ms": 1e3 * seconds / count for years, seconds in spent.items()}
    best = max(value for name, value in figures.items() if name.startswith("outlook"))
    figures["best outlook correlation"] = best
    targets = {"best outlook correlation": Target(at_least=0.6)}
    return Outcome(benchmark="outlook", metrics=figures, targets=targets)


def _play(name: str) -> tuple[list[Board], list[float]]:
    """The boards of `SPRINGS` in a whole game, and each power's share of squared centres at its end."""
    board, boards = Board.start(), list[Board]()
    while not board.is_over and board.year <= LAST_YEAR:
        if board.phase in SPRINGS:
            boards.append(board.fork())
        legal = board.legal_orders()
        board.advance({power: player("dumbbot")(legal[power], dice(name, board.phase, power), board) for power in legal})
    end = compute_standing(board)
    board.release()
    return boards, list(map(end.sos_share, POWERS))


def _outlooks(board: Board, name: str, years: int) -> list[tuple[float, ...]]:
    settings = OutlookSettings(playouts=PLAYOUTS, years=years)
    return [outlook(board, f"{name}/{number}", settings) for number in range(PLAYOUTS)]
