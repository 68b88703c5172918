"""Tactical positions: small positions with known best order sets, and the share of draws in which a player finds one.

A position is data (`evaluation/tactical/*.toml`): units, centres, the power to order, and `best`, the list of best order sets.
Tests check `best` with the rules engine by this criterion:

    value     centres that the power would own if the year ended now: those that its units occupy, and those it owned that no
              other power's unit occupies
    worth     of an order set: the smallest value over all replies. A reply is one order for each unit of the named opponents;
              units of other powers hold. With `supported = false` only replies without supports count.
    best      all order sets of the largest worth

With `phases = 2`, as in builds and disbands, a movement phase follows in which the power gives its own best order set before
the value is taken: worth = min over replies of max over orders of min over replies.
"""

import asyncio
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evaluation.intervals import Estimate, estimate
from game.board import Board
from game.legal import LegalOrders
from game.players import player
from game.snapshot import Snapshot, make_snapshot
from rollouts.deciders import Decider, DecisionRequest
from rollouts.seeds import dice
from storage.files import durable_write, make_directory
from storage.runs import RunPaths
from telemetry.errors import DataError

FOLDER = Path(__file__).with_name("tactical")
DRAWS = 16
"""Order sets that a player draws for each position."""
_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TacticalPosition:
    """One position and its best order sets."""

    name: str
    theme: str
    """support | cut | convoy | dislodge | standoff | defence | build | disband | retreat."""
    idea: str
    """The reason why the best orders are best, in one sentence."""
    power: str
    """The power to order."""
    opponents: tuple[str, ...]
    """Powers whose replies count."""
    supported: bool
    """If False, only replies without supports count: opponents move, hold and build."""
    phases: int
    """Phases until the value is taken: 1, or 2 if a movement phase shows what a build was worth."""
    best: tuple[tuple[str, ...], ...]
    """All order sets of the largest worth, in canonical form."""
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TacticsScore:
    """The share of tactical positions that a player solves."""

    player: str
    policy_version: int
    draws: int
    """Order sets drawn per position."""
    share: Estimate
    """Mean share of draws that are best; the interval resamples positions."""
    solved: dict[str, float]
    """Share of best draws by position."""
    by_theme: dict[str, float]


_SCORE = TypeAdapter(TacticsScore)


def load_positions(folder: Path = FOLDER) -> list[TacticalPosition]:
    """All positions, by file name and order in the file.

    Raises:
        DataError: an entry lacks something that a position needs.
    """
    found = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["position"]:
            try:
                found.append(_position(file.stem, entry))
            except (KeyError, ValueError) as error:
                raise DataError(f"{file}, position {entry.get('name', '?')!r}: {error!r}") from error
    return found


def _position(theme: str, entry: Mapping) -> TacticalPosition:
    return TacticalPosition(
        name=entry["name"],
        theme=theme,
        idea=entry["idea"],
        power=entry["power"],
        opponents=tuple(entry["opponents"]),
        supported=entry.get("supported", True),
        phases=entry.get("phases", 1),
        best=tuple(tuple(orders) for orders in entry.get("best", ())),
        snapshot=_snapshot(entry),
    )


def _snapshot(entry: Mapping) -> Snapshot:
    """A new game's position with the units, centres and dislodged units of `entry`."""
    text = json.loads(Board.start().snapshot(game_id="tactical", seed=0, source="tactical").position)
    phase = entry["phase"]
    kinds = {"M": "MOVEMENT", "R": "RETREATS", "A": "ADJUSTMENTS"}
    seasons = {"S": "SPRING", "F": "FALL", "W": "WINTER"}
    text["phase"] = f"{seasons[phase[0]]} {phase[1:-1]} {kinds[phase[-1]]}"
    retreats, background = entry.get("retreats", {}), entry.get("background", ())
    for power in text["powers"]:
        name = power["name"]
        if name not in background:  # powers in the background keep their units and centres of a new game
            power["units"] = list(entry["units"].get(name, ()))
            power["centers"] = list(entry["centres"].get(name, ()))
        power["influence"] = sorted({unit[2:5] for unit in power["units"]} | set(power["centers"]))
        power["retreats"] = {unit: list(places) for unit, places in retreats.get(name, {}).items()}
    text["dislodged"] = dict(entry.get("dislodged_by", {}))
    position = json.dumps(text, separators=(",", ":"))
    return make_snapshot(position, phase, source="tactical", game_id=f"tactical/{entry['name']}", seed=0)


async def solve(
    name: str,
    version: int,
    positions: Sequence[TacticalPosition],
    decider: Decider | None = None,
    draws: int = DRAWS,
    on_position: Callable[[int, int], None] | None = None,
) -> TacticsScore:
    """The score of a player on the positions; all players get the same random numbers.

    Args:
        name: the scripted player to measure; with `decider`, only the name of the result.
        draws: order sets drawn per position.
        on_position: called with the positions done and the total positions.
    """
    solved = {}
    for done, position in enumerate(positions, start=1):
        board = Board.restore(position.snapshot)
        legal = board.legal_orders()[position.power]
        drawn = await asyncio.gather(*(_draw_orders(name, decider, position, board, legal, number) for number in range(draws)))
        solved[position.name] = sum(tuple(orders) in position.best for orders in drawn) / draws
        if on_position is not None:
            on_position(done, len(positions))
    by_theme: dict[str, list[float]] = {}
    for position in sorted(positions, key=lambda position: position.theme):
        by_theme.setdefault(position.theme, []).append(solved[position.name])
    return TacticsScore(
        player=name,
        policy_version=version,
        draws=draws,
        share=estimate(list(solved.values()), list(solved), _SEED, share=True),
        solved=solved,
        by_theme={theme: sum(shares) / len(shares) for theme, shares in by_theme.items()},
    )


async def _draw_orders(
    name: str, decider: Decider | None, position: TacticalPosition, board: Board, legal: LegalOrders, number: int
) -> Sequence[str]:
    dice_name = f"tactical/{_SEED}/{position.name}/{number}"
    if decider is None:
        return player(name)(legal, dice(dice_name, position.power), board)
    request = DecisionRequest(
        game=f"{dice_name}/{name}",
        dice=dice_name,
        ply=0,
        power=position.power,
        legal=legal,
        board=board,
        snapshot_id=position.snapshot.snapshot_id,
    )
    return await decider.decide(request)


def compare_scores(score: TacticsScore, other: TacticsScore) -> Estimate:
    """Mean difference of the shares between two scores, paired by position."""
    differences = [share - other.solved[name] for name, share in score.solved.items() if name in other.solved]
    return estimate(differences, range(len(differences)), _SEED)


def write_tactics(paths: RunPaths, score: TacticsScore) -> None:
    """Write the tactical score of a version of the run."""
    file = _file(paths, score.policy_version)
    make_directory(file.parent)
    durable_write(file, _SCORE.dump_json(score, indent=1))


def read_tactics(paths: RunPaths, version: int) -> TacticsScore | None:
    """The tactical score of a version; None if it was not measured.

    Raises:
        DataError: the file is damaged.
    """
    file = _file(paths, version)
    try:
        return _SCORE.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{file} is not a tactical score of this version: delete it, and it is measured again") from error


def _file(paths: RunPaths, version: int) -> Path:
    return paths.scores / "tactical" / f"v{version:06d}.json"
