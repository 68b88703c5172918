"""Odd positions put by hand, from seeds: crowded seas and coasts, where convoys, supports and circles of moves meet."""

import random
from collections.abc import Mapping
from functools import cache

from entente.game.board import POWERS
from entente.game.geography import geography
from entente.game.positions import board_of

Position = tuple[dict[str, list[str]], dict[str, list[str]]]


def odd_position(seed: int) -> Position:
    """Units and legal orders per power of a spring movement phase; a few units have no order."""
    rng = random.Random(f"odd {seed}")
    units = _units(rng)
    legal = board_of("S1902M", units, {}, {}).legal_orders()
    options = {site: set(texts) for own in legal.values() for site, texts in zip(own.sites, own.options, strict=True)}
    plan = _Plan(options, rng)
    plan.make()
    return units, {power: [plan.chosen[site] for site in own.sites if rng.random() < 0.98] for power, own in legal.items()}


def _units(rng: random.Random) -> dict[str, list[str]]:
    """Neighbouring provinces, most of them occupied, by two to five powers."""
    reach = geography().reach
    places = sorted({location[:3] for _, location in reach})
    seas = [place for place in places if ("A", place) not in reach]
    region, size = {rng.choice(seas if rng.random() < 0.7 else places)}, rng.randint(8, 22)
    while len(region) < size:
        region |= {near for place in sorted(region) for near in _beside(place) if rng.random() < 0.3}
    powers = rng.sample(POWERS, rng.randint(2, 5))
    units: dict[str, list[str]] = {power: [] for power in powers}
    for place in sorted(region):
        kinds = sorted(unit for unit in reach if unit[1][:3] == place)
        is_sea = kinds[0][0] == "F"
        if rng.random() < (0.95 if is_sea else 0.75):
            units[rng.choice(powers)].append(" ".join(kinds[0] if rng.random() < 0.4 else rng.choice(kinds)))
    return units


@cache
def _beside(place: str) -> list[str]:
    return sorted({near[:3] for (_, at), steps in geography().reach.items() if at[:3] == place for near in steps})


class _Plan:
    """Orders that have to do with each other: convoys, assaults on their fleets, supports, circles."""

    def __init__(self, options: Mapping[str, set[str]], rng: random.Random) -> None:
        self.options, self.rng = options, rng
        self.chosen: dict[str, str] = {}

    def make(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.convoy()
        fleets = [site[2:5] for site, order in self.chosen.items() if " C " in order]
        for place in self.rng.sample(fleets, min(len(fleets), self.rng.randint(0, 4))):
            self.assault(place)
        for move in [order.removesuffix(" VIA") for order in self.chosen.values()]:
            if move[0] == "A" and self.rng.random() < 0.7:
                self.entangle(move[-3:], fleets)
        for site in self.rng.sample(sorted(self.options), len(self.options)):
            if site not in self.chosen:
                self.rng.choice([self.assault, self.help, self.help, self.move])(site[2:5])
        for site in sorted(self.options.keys() - self.chosen.keys()):
            self.chosen[site] = self.rng.choice(sorted(self.options[site]))

    def free(self) -> list[str]:
        return self.rng.sample(rest := sorted(self.options.keys() - self.chosen.keys()), len(rest))

    def take(self, site: str, order: str, chance: float = 1.0) -> None:
        if site not in self.chosen and order in self.options[site] and self.rng.random() < chance:
            self.chosen[site] = order

    def convoy(self) -> None:
        """An army by sea, most often to an occupied province, with most of the fleets that could carry it, and supports."""
        moves = [order for site in self.free() for order in sorted(self.options[site]) if order.endswith(" VIA")]
        occupied = {site[2:5] for site in self.options}
        hostile = [order for order in moves if order[8:11] in occupied]
        moves = hostile if hostile and self.rng.random() < 0.75 else moves
        if moves:
            move = self.rng.choice(moves).removesuffix(" VIA")
            for site in self.free():
                self.take(site, f"{site} C {move}", 0.85)
            self.take(move[:5], move, 0.4)  # where it could also go by land
            self.take(move[:5], f"{move} VIA")
            self.support(move, 0.3)

    def moves(self, site: str) -> list[str]:
        """The moves of a unit by land, or of a fleet."""
        return [order for order in sorted(self.options[site]) if order.startswith(f"{site} - ") and not order.endswith("VIA")]

    def assault(self, place: str) -> None:
        """A move into `place` by one of the units beside it, and supports of it."""
        moves = [(site, order) for site in self.free() for order in self.moves(site) if order[len(site) + 3 :][:3] == place]
        if moves:
            site, move = self.rng.choice(moves)
            self.take(site, move)
            self.support(move, self.rng.choice([0.0, 0.3, 0.6]))

    def entangle(self, place: str, fleets: list[str]) -> None:
        """A support, by the unit in `place`, of a move against one of `fleets` or of the fleet itself."""
        texts = [order for order in self.chosen.values() if order[5:8] == " - " and order[8:11] in fleets]
        texts += [f"F {fleet}" for fleet in fleets]
        for site in self.free():
            for text in self.rng.sample(texts, len(texts)) if site[2:5] == place else ():
                self.take(site, f"{site} S {text}")

    def support(self, move: str, chance: float) -> None:
        for site in self.free():
            for order in (f"{site} S {move}", f"{site} S {move[:-3]}"):
                self.take(site, order, chance)

    def help(self, place: str) -> None:
        """A support by the unit in `place` of what another unit does."""
        site = next(site for site in self.options if site[2:5] == place)
        told = {order.removesuffix(" VIA") for order in self.chosen.values()}
        told |= {order[:-3] for order in told if order[-3:-2] == "/"} | self.options.keys()
        helpful = [order for order in sorted(self.options[site]) if " S " in order and order.split(" S ")[1] in told]
        if helpful:
            self.take(site, self.rng.choice(helpful))

    def move(self, place: str) -> None:
        site = next(site for site in self.options if site[2:5] == place)
        if moves := self.moves(site):
            self.take(site, self.rng.choice(moves))
