"""Features of a position: int8 [FEATURES], a row of CHANNELS per province, then the power, the phase kind and the years."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from entente.game.board import Board
from entente.game.geography import geography, province
from entente.game.snapshot import POWERS

CHANNELS = (
    *("army", "fleet", "on a north or east coast", "on a south coast", *(f"unit of {power}" for power in POWERS)),
    *("dislodged army", "dislodged fleet", *(f"dislodged of {power}" for power in POWERS)),
    *("centre", *(f"centre of {power}" for power in POWERS)),
    *("asked now", "led to by own orders of this phase"),
)
"""Features of a province; all are 0 or 1, except the last, a count."""
PHASE_KINDS = ("SM", "SR", "FM", "FR", "WA")
"""First and last letter of the phase name, one-hot."""
PROVINCES = 75
FEATURES = PROVINCES * len(CHANNELS) + len(POWERS) + len(PHASE_KINDS) + 1
_UNIT, _DISLODGED, _CENTRE = 4, CHANNELS.index("dislodged army"), CHANNELS.index("centre")
_ASKED, _LED_TO = len(CHANNELS) - 2, len(CHANNELS) - 1
_COAST = {"/NC": 2, "/EC": 2, "/SC": 3}


@lru_cache(maxsize=1)
def province_rows() -> dict[str, int]:
    provinces = sorted({province(location) for _, location in geography().reach})
    return {name: row for row, name in enumerate(provinces)}


class BoardFeatures:
    __slots__ = ("_shared",)

    def __init__(self, board: Board, first_year: int) -> None:
        rows, shared = province_rows(), np.zeros(FEATURES, np.int8)
        table = shared[: PROVINCES * len(CHANNELS)].reshape(PROVINCES, -1)
        units, dislodged, centres = board.units(), board.dislodged(), board.centres()
        at: list[tuple[int, int]] = [(rows[centre], _CENTRE) for centre in geography().centres]
        for number, power in enumerate(POWERS):
            for unit in units[power]:
                row, coast = rows[unit[2:5]], unit[5:]
                at += [(row, unit[0] == "F"), (row, _UNIT + number)]
                if coast:
                    at.append((row, _COAST[coast]))
            for unit in dislodged[power]:
                at += [(rows[unit[2:5]], _DISLODGED + (unit[0] == "F")), (rows[unit[2:5]], _DISLODGED + 2 + number)]
            at += [(rows[centre], _CENTRE + 1 + number) for centre in centres[power]]
        table[tuple(zip(*at, strict=True))] = 1
        if not board.is_over:
            shared[-1 - len(PHASE_KINDS) + PHASE_KINDS.index(board.season + board.phase_type)] = 1
        shared[-1] = board.year - first_year
        self._shared = shared

    def of(self, power: str, site: str = "", orders: Sequence[str] = ()) -> np.ndarray:
        """`site`: the current unit or centre, as "A PAR" or "PAR"; `orders`: those of this phase so far."""
        features, rows, width = self._shared.copy(), province_rows(), len(CHANNELS)
        features[PROVINCES * width + POWERS.index(power)] = 1
        if site:
            features[rows[site[-6:].split(" ")[-1][:3]] * width + _ASKED] = 1
        for order in orders:
            features[rows[_last_place(order)] * width + _LED_TO] += 1
        return features


@lru_cache(maxsize=1 << 16)
def _last_place(order: str) -> str:
    return next(province(word) for word in reversed(order.split(" ")) if province(word) in province_rows())
