"""The benchmark of outlooks correlates what it says with the real end of the games that it plays."""

import numpy as np
import pytest

from benchmarks import outlook as module
from entente.game.board import POWERS
from entente.game.scores import compute_standing


def test_a_measure_is_held_against_the_squares_at_the_end(monkeypatch):
    for name, value in {"SPRINGS": ("S1902M",), "LAST_YEAR": 1902, "YEARS": (1,), "PLAYOUTS": 2}.items():
        monkeypatch.setattr(module, name, value)
    found = module.bench_outlook(games=2, seed=3).metrics
    games = [module._play(f"outlook/3/{game}") for game in range(2)]
    assert [board.phase for boards, _ in games for board in boards] == ["S1902M"] * 2
    now = [compute_standing(board).sos_share(power) for boards, _ in games for board in boards for power in POWERS]
    ends = [share for _, end in games for share in end]
    assert sum(ends) == pytest.approx(2)
    assert found["squares now correlation"] == pytest.approx(np.corrcoef(now, ends)[0, 1])
    assert found["best outlook correlation"] > 0.3
