"""A result card: one file from which anybody can check a match, and play its games again.

It holds the settings, the players with hashes of their weights, the environments that the games were played in, every game with
a hash of each phase, the table, and a checksum of all. `read_card` refuses a card that does not follow from itself. Only playing
its games again shows whether they are true (`flows/verify_card.py`). A game's luck follows from the seed in the settings and its
pair: no other number is needed. Equal matches have equal cards.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from evaluation.match_table import MatchTable, match_table
from evaluation.matches import GamePlan, GameResult, plan_match
from evaluation.protocols import check_protocol
from evaluation.settings import MatchSettings
from game.prompt_settings import PromptSettings
from game.snapshot import Snapshot, read_position
from rollouts.opponents import is_endpoint
from rollouts.seeds import dice
from storage.json_files import is_sealed, sealed
from storage.runs import durable_write
from telemetry.errors import DataError, InputError
from telemetry.machine import code_hash, cpu_model, environment, package_version
from telemetry.read_file import read_text

_LARGEST = 64 << 20
"""Bytes; a card of 210 games of ten years has a quarter of a megabyte."""
_TOLERANCE = 1e-9
"""Difference of two figures of a table that are equal: another numpy may add in another order."""
_PLAYING_ROOMS = ("game", "decoding", "records", "inference", "rollouts", "search", "evaluation")
"""Rooms whose code decides how a game goes."""
_MOST_RESAMPLES = 100_000
"""Of an interval in a card from others, so that reading it ends."""
_MORE_PACKAGES = ("entente", "numpy", "tokenizers", "openskill")


class CardPlayer(BaseModel):
    """One player of a card."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As in the seats; a scripted player has nothing else."""
    run: str = ""
    """The run of a version."""
    version: int = 0
    adapter: str = ""
    """Hash of the adapter's files, 32 hex digits; empty without one."""
    weights: str = ""
    """SHA-256 of the weights of the model, or of the adapter's base."""
    tokenizer: str = ""
    """SHA-256 of its tokenizer.json."""
    prompts: PromptSettings | None = None
    """How its prompts are written."""
    engine: str = ""
    """What drew its orders."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be equal so that another player plays the same."""
        return self.adapter, self.weights, self.tokenizer, self.prompts


class ResultCard(BaseModel):
    """The content of a card."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: Literal[1] = 1
    """Version of this layout."""
    settings: MatchSettings
    players: tuple[CardPlayer, ...]
    """The measured players, then opponents of the other seats, if any."""
    environments: tuple[dict[str, str], ...]
    """Machines and versions that the games were played on, oldest first; see `playing_environment`."""
    starts: tuple[Snapshot, ...]
    """Held-out positions that the rounds begin from, in turn; empty: spring 1901."""
    table: MatchTable
    games: tuple[GameResult, ...]
    """In the order of the match."""
    checksum: str = ""
    """SHA-256 of all other entries; set where the card was read."""

    def plans(self) -> list[GamePlan]:
        """The games that the settings ask for."""
        per_round = len(plan_match(self.settings, 1, self.starts))
        return plan_match(self.settings, -(-len(self.games) // per_round), self.starts)


def playing_environment() -> dict[str, str]:
    """Facts about this machine and code that the play of a model may depend on."""
    return environment() | {
        "cpu": cpu_model(),
        "code": code_hash(_PLAYING_ROOMS),
        **{package: package_version(package) for package in _MORE_PACKAGES},
    }


def check_card_players(match: MatchSettings) -> None:
    """Refuse a card for a match that nobody could repeat.

    Raises:
        InputError: an endpoint plays.
    """
    if endpoint := next((name for name in (*match.players, match.opponents) if is_endpoint(name)), ""):
        raise InputError(f"a card must be repeatable by others, and what '{endpoint}' answers is not: leave out --card")


def make_card(
    match: MatchSettings,
    games: Mapping[str, GameResult],
    players: Sequence[CardPlayer],
    environments: Sequence[dict[str, str]],
    rounds: int,
    held_out: Sequence[Snapshot] = (),
) -> ResultCard:
    """The card of a match.

    Players that are named by a folder from the root have the folder's own name in the card.

    Args:
        games: by key; all games of `rounds` rounds.
        held_out: positions that the games begin from; empty: spring 1901.

    Raises:
        InputError: an endpoint plays, or two folders have one name.
    """
    check_card_players(match)
    short = {player.name: Path(player.name).name if player.name.startswith("/") else player.name for player in players}
    if len(set(short.values())) < len(short):
        raise InputError("two players would have one name in the card: name their folders from the working folder")
    renamed = match.model_copy(
        update={
            "players": tuple(short[name] for name in match.players),
            "opponents": short.get(match.opponents, ""),
        }
    )
    starts = tuple(snapshot for snapshot in held_out if snapshot.phase_type == "M")[:rounds]
    found = []
    for old, new in zip(plan_match(match, rounds, starts), plan_match(renamed, rounds, starts), strict=True):
        found.append(replace(games[old.key], key=new.key, cluster=new.cluster, seats=new.seats))
    return ResultCard(
        settings=renamed,
        players=tuple(player.model_copy(update={"name": short[player.name]}) for player in players),
        environments=tuple(environments),
        starts=starts,
        table=match_table(found, renamed),
        games=tuple(found),
    )


def write_card(file: Path, card: ResultCard) -> None:
    """Write the card; a game is one line."""
    record = json.loads(card.model_dump_json(exclude={"checksum": True, "settings": {"outside"}}))
    parts = []
    for name, value in sorted(json.loads(sealed(record)).items()):
        lines = ",\n".join(json.dumps(each, sort_keys=True) for each in value) if name in ("games", "starts") else ""
        parts.append(f'"{name}": ' + (f"[\n{lines}\n]" if lines else json.dumps(value, indent=1, sort_keys=True)))
    durable_write(file, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def read_card(file: Path) -> ResultCard:
    """The card in a file, which follows from itself.

    Raises:
        InputError: it is no card, was changed, or its table or games are not those of its games and settings.
    """
    try:
        record = json.loads(read_text(file, at_most=_LARGEST, what="result card"))
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("card") != 1:
        raise InputError(f"'{file}' is no result card of this release: `entente evaluate --card FILE` writes one")
    if not is_sealed(record):
        raise InputError(f"card '{file}' was changed: its checksum is not that of its content; ask its writer for it again")
    try:
        card = ResultCard.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"card '{file}' is damaged: {where}: {first['msg']}; ask its writer for it again") from error
    _check(file, card, record["table"])
    return card


def _check(file: Path, card: ResultCard, table: Any) -> None:
    try:
        check_card_players(card.settings)
        check_protocol(card.settings)
        if card.settings.bootstrap > _MOST_RESAMPLES:
            raise InputError(f"its intervals take more than {_MOST_RESAMPLES:,} resamples")
        for snapshot in card.starts:
            read_position(snapshot)
        plans = card.plans()
    except (InputError, DataError) as error:
        raise InputError(f"card '{file}' cannot be right: {error}") from error
    if {each.name for each in card.players} != {*card.settings.players, card.settings.opponents} - {""}:
        raise InputError(f"card '{file}' cannot be right: its players are not those of its settings")
    for plan, game in zip(plans, card.games, strict=False):
        if (plan.key, plan.seats, plan.measured, plan.pair, plan.cluster) != (
            *(game.key, game.seats, game.measured, game.pair, game.cluster),
        ):
            raise InputError(f"card '{file}' cannot be right: game {game.key} is not the one that its settings ask for")
    if len(plans) != len(card.games):
        raise InputError(f"card '{file}' cannot be right: it lacks {len(plans) - len(card.games)} games of its last round")
    follows = json.loads(TypeAdapter(MatchTable).dump_json(match_table(card.games, card.settings)))
    if different := _first_difference(table, follows):
        raise InputError(f"the table of card '{file}' does not follow from its games: {different}")


def _first_difference(stated: Any, found: Any, where: str = "") -> str:
    """Where two JSON values differ, and how; empty if they are equal."""
    if isinstance(stated, dict) and isinstance(found, dict) and stated.keys() == found.keys():
        return next(filter(None, (_first_difference(stated[key], found[key], f"{where}.{key}") for key in stated)), "")
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        pairs = enumerate(zip(stated, found, strict=True))
        return next(filter(None, (_first_difference(*pair, f"{where}.{index}") for index, pair in pairs)), "")
    if (
        isinstance(stated, float)
        and isinstance(found, float)
        and math.isclose(stated, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    ):
        return ""
    return "" if stated == found else f"{where.removeprefix('.')} is {stated}, and by the games {found}"


def sampled_games(card: ResultCard, share: float, seed: int) -> list[int]:
    """Indices of the games to play again, ascending: `share` of all, rounded up, chosen by `seed`."""
    count = max(1, math.ceil(share * len(card.games) - 1e-9))
    return sorted(dice("verify-card", card.checksum, seed).sample(range(len(card.games)), count))


def first_different_phase(stated: GameResult, played: GameResult) -> str:
    """The first phase in which two games differ; 'the end' if only their results do, empty if they are equal."""
    if stated.phases:
        for phase in (*played.phases, *stated.phases):  # a card sorts its phases by name
            if stated.phases.get(phase) != played.phases.get(phase):
                return phase
    same = replace(played, phases=stated.phases, cluster=stated.cluster) == stated
    return "" if same else "the end"


def environment_differences(card: ResultCard, here: Mapping[str, str]) -> list[str]:
    """What was otherwise where the card's newest games were played: "torch 2.9, here 2.10"."""
    there = card.environments[-1] if card.environments else {}
    return [f"{name} {value}, here {here.get(name, 'unknown')}" for name, value in there.items() if here.get(name) != value]
