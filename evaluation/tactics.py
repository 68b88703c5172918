"""Tactical positions: small situations with a best order set, and the share of them that a player solves.

A position is data (`evaluation/tactical/*.toml`): who stands where, whose move it is, and `best`, the order sets that are best.
Best is what the engine proves, by this criterion and no other:

    value     centres that the power would own if the year ended now: those it stands on, and those it owned that nobody else
              stands on
    worth     of an order set: the smallest value over all replies, a reply being one order for each unit of the opponents named
              (units of other powers hold); with `supported = false`, over the replies in which none of these units supports
    best      the order sets of the largest worth; `best` lists them all

With `phases = 2`, as in builds and disbands, a movement phase follows, in which the power answers with its own best order set
before the value is taken: worth = min over replies of max over orders of min over replies.
"""

import asyncio
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evaluation.intervals import Estimate, estimate
from game.board import POWERS, Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.players import player
from game.snapshot import Snapshot, position_id
from rollouts.deciders import Decider, Question
from rollouts.seeds import dice
from storage.files import make_directory
from storage.runs import RunPaths, durable_write
from telemetry.errors import DataError

FOLDER = Path(__file__).with_name("tactical")
DRAWS = 16
"""Order sets that a player gives for each position."""
_RESAMPLES = 2000
_SEED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TacticalPosition:
    """One position and what is best in it."""

    name: str
    theme: str
    """support | cut | convoy | dislodge | standoff | defence | build | disband | retreat."""
    idea: str
    """Why the best is best, in a sentence."""
    power: str
    """Who is to order."""
    opponents: tuple[str, ...]
    """Powers whose replies are all tried."""
    supported: bool
    """Whether replies with supports count; without, the opponents only move, hold and build."""
    phases: int
    """Phases until the value is taken: 1, or 2 where a movement phase must show what a build was worth."""
    best: tuple[tuple[str, ...], ...]
    """All order sets of the largest worth, in canonical form."""
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TacticsScore:
    """What a player solved."""

    player: str
    policy_version: int
    draws: int
    """Order sets for each position."""
    share: Estimate
    """Mean share of draws that are best; the interval resamples positions."""
    solved: dict[str, float]
    """Share by position."""
    by_theme: dict[str, float]


_SCORE = TypeAdapter(TacticsScore)


def load_positions(folder: Path = FOLDER) -> list[TacticalPosition]:
    """All positions, by name of file and place in it.

    Raises:
        DataError: a file does not say what a position needs.
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
    """The position as the board's own text: a fresh game's, with these units, centres and dislodged units in it."""
    fresh = Board.start().snapshot(game_id="tactical", seed=0, source="tactical")
    text = json.loads(fresh.position)
    phase = entry["phase"]
    kinds = {"M": "MOVEMENT", "R": "RETREATS", "A": "ADJUSTMENTS"}
    seasons = {"S": "SPRING", "F": "FALL", "W": "WINTER"}
    text["phase"] = f"{seasons[phase[0]]} {phase[1:-1]} {kinds[phase[-1]]}"
    retreats, at_home = entry.get("retreats", {}), entry.get("background", ())
    for power in text["powers"]:
        name = power["name"]
        if name not in at_home:  # those in the background stand where they began
            power["units"] = list(entry["units"].get(name, ()))
            power["centers"] = list(entry["centres"].get(name, ()))
        power["influence"] = sorted({unit[2:5] for unit in power["units"]} | set(power["centers"]))
        power["retreats"] = {unit: list(places) for unit, places in retreats.get(name, {}).items()}
    text["dislodged"] = dict(entry.get("dislodged_by", {}))
    position = json.dumps(text, separators=(",", ":"))
    owned = {power["name"]: len(power["centers"]) for power in text["powers"]}
    return Snapshot(
        snapshot_id=position_id(position),
        phase=phase,
        year=int(phase[1:-1]),
        season=phase[0],
        phase_type=phase[-1],
        centres=tuple(owned[power] for power in POWERS),
        position=position,
        source="tactical",
        game_id=f"tactical/{entry['name']}",
        seed=0,
    )


# -- the proof --------------------------------------------------------------------------------------------------------------


def order_sets(legal: LegalOrders) -> Iterator[tuple[str, ...]]:
    """Every legal set of orders of one power, in canonical form."""
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        yield from itertools.product(*legal.options)
        return
    sizes = range(legal.picks + 1) if legal.kind is OrderKind.BUILD else (legal.picks,)
    for size in sizes:
        for sites in itertools.combinations(legal.options, size):
            for orders in itertools.product(*sites):
                yield orders + (WAIVE,) * (legal.picks - size)


def value(board: Board, power: str) -> int:
    """Centres that `power` would own if the year ended now."""
    stands = {unit[2:5]: owner for owner, units in board.units().items() for unit in units}
    centres = board.centres()
    everywhere = {centre for own in centres.values() for centre in own} | set(board.free_centres())
    owned = set(centres[power])
    return sum(stands.get(centre, power if centre in owned else "") == power for centre in everywhere)


def worth(
    board: Board, position: TacticalPosition, orders: Sequence[str], *, enough: int = -1, killers: list | None = None
) -> int:
    """Of an order set: its smallest value over all replies.

    Args:
        enough: once the worth is known to be at most this, that bound may be returned instead.
        killers: replies that refuted others, tried first; what refutes here is put in front.
    """
    return _worth(board, position, tuple(orders), position.phases, enough, [] if killers is None else killers)


def _worth(board: Board, position: TacticalPosition, orders: Sequence[str], phases: int, enough: int, killers: list) -> int:
    least = len(POWERS) * 34
    for reply in _replies(board, position, killers):
        after = board.fork()
        after.step({position.power: list(orders), **reply})
        least = min(least, _after(after, position, phases - 1, least))
        if least <= enough:
            if reply in killers:
                killers.remove(reply)
            killers.insert(0, reply)
            return least
    return least


def _after(board: Board, position: TacticalPosition, phases: int, most: int) -> int:
    """The value some phases later, both sides doing their best; at least `most` may be returned for more."""
    while phases and not board.is_over and board.phase_type != "M":
        board.step({})
    if not phases or board.is_over:
        return value(board, position.power)
    legal, best, killers = board.legal_orders().get(position.power), -1, []
    for orders in order_sets(legal) if legal is not None else [()]:
        best = max(best, _worth(board, position, orders, phases, best, killers))
        if best >= most:
            break
    return best


def _replies(board: Board, position: TacticalPosition, killers: Sequence[dict]) -> Iterator[dict[str, list[str]]]:
    yield from list(killers)
    legal = {power: choice for power, choice in board.legal_orders().items() if power in position.opponents}
    own = [
        [some for some in order_sets(choice) if position.supported or not any(" S " in order for order in some)]
        for choice in legal.values()
    ]
    for joint in itertools.product(*own):
        yield {power: list(orders) for power, orders in zip(legal, joint, strict=True)}


def prove(position: TacticalPosition) -> tuple[int, list[tuple[str, ...]]]:
    """The largest worth, and all order sets that have it, found by trying every order set against every reply."""
    board = Board.restore(position.snapshot)
    legal = board.legal_orders()[position.power]
    largest, best, killers = -1, [], []
    # Those that are said to be best come first, so that the others need only be refuted.
    claimed = [orders for orders in position.best if legal.admits(orders)]
    for orders in [*claimed, *(some for some in order_sets(legal) if some not in claimed)]:
        found = worth(board, position, orders, enough=largest - 1, killers=killers)
        if found > largest:
            largest, best = found, []
        if found == largest:
            best.append(orders)
    return largest, best


# -- who solves them --------------------------------------------------------------------------------------------------------


async def solve(
    name: str,
    version: int,
    positions: Sequence[TacticalPosition],
    decider: Decider | None = None,
    draws: int = DRAWS,
    on_position: Callable[[int, int], None] | None = None,
) -> TacticsScore:
    """What a player solves: `decider`, or the scripted player of this name; the same dice for all players."""
    solved = {}
    for done, position in enumerate(positions, start=1):
        board = Board.restore(position.snapshot)
        legal = board.legal_orders()[position.power]
        given = await asyncio.gather(*(_orders(name, decider, position, board, legal, number) for number in range(draws)))
        solved[position.name] = sum(tuple(orders) in position.best for orders in given) / draws
        if on_position is not None:
            on_position(done, len(positions))
    themes = sorted({position.theme for position in positions})
    return TacticsScore(
        player=name,
        policy_version=version,
        draws=draws,
        share=estimate(list(solved.values()), list(solved), _RESAMPLES, _SEED, share=True),
        solved=solved,
        by_theme={
            theme: sum(solved[each.name] for each in positions if each.theme == theme)
            / sum(each.theme == theme for each in positions)
            for theme in themes
        },
    )


async def _orders(
    name: str, decider: Decider | None, position: TacticalPosition, board: Board, legal: LegalOrders, number: int
) -> Sequence[str]:
    luck = f"tactical/{_SEED}/{position.name}/{number}"
    if decider is None:
        return player(name)(legal, dice(luck, position.power), board)
    question = Question(
        game=f"{luck}/{name}",
        dice=luck,
        ply=0,
        power=position.power,
        legal=legal,
        board=board,
        snapshot_id=position.snapshot.snapshot_id,
    )
    return await decider.decide(question)


def gained(score: TacticsScore, other: TacticsScore) -> Estimate:
    """How much more of the positions the one solves than the other, position by position."""
    differences = [share - other.solved[name] for name, share in score.solved.items() if name in other.solved]
    return estimate(differences, range(len(differences)), _RESAMPLES, _SEED)


def write_tactics(paths: RunPaths, score: TacticsScore) -> None:
    """Keep what a version of the run solved."""
    file = _file(paths, score.policy_version)
    make_directory(file.parent)
    durable_write(file, _SCORE.dump_json(score, indent=1))


def read_tactics(paths: RunPaths, version: int) -> TacticsScore | None:
    """What a version solved; None if that was not measured.

    Raises:
        DataError: the file is damaged.
    """
    file = _file(paths, version)
    try:
        return _SCORE.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{file} is no tactical score of this version: delete it, and it is measured again") from error


def _file(paths: RunPaths, version: int) -> Path:
    return paths.scores / "tactical" / f"v{version:06d}.json"
