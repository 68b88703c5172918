"""Whole games of a policy, in which a search labels each decision of one seat.

In some games that seat plays what the policy sampled, so labels are of positions that the policy reaches; in the others it plays
the search's choice, so late years of large powers are labelled too (DAgger with a mixed policy: Ross et al., arXiv 1011.0686).
A file holds `GAMES_A_FILE` games. A game depends on settings, policy and its number alone, so a killed command loses one file's
work, several processes share a folder, and machines divide the numbers.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from entente.game.board import POWERS, Board
from entente.players.opponents import POLICY, read_table, sample_opponents
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.search import check_search, propose, search, search_seed_name
from entente.players.search_settings import SearchSettings
from entente.players.seeds import seeded_rng
from entente.records.label import Label
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import EngineError, InputError
from entente.telemetry.setting_marks import Seed, Settings
from storage.control import code_of_play
from storage.files import file_lock
from storage.labels import label_path, publish_alike

GAMES_A_FILE = 4
"""About a minute of work on one core, which a kill loses."""
ITSELF = "v0"
"""The policy itself in a table of opponents."""
_PLAYOUTS = 80
"""Fewer than in play, because there are many decisions."""


class LabelSettings(Settings):
    """Which games are labelled, and by which search."""

    first_game: Annotated[int, Field(ge=0, multiple_of=GAMES_A_FILE)] = 0
    """Number of the first game, a multiple of 4: machines that divide the work have different ones."""
    games: Annotated[int, Field(ge=1)] = 1000
    """Games, in files of 4; the policy plays each power equally often."""
    years: Annotated[int, Field(ge=1, le=20)] = 20
    """Game years of a game from spring 1901; a solo ends it earlier."""
    opponents: str = "dumbbot*3,v0"
    """Players of the six other seats of a game, sampled by weight: scripted players, or v0, the policy itself."""
    search_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of games in which the seat plays the search's choice; in the others it plays what the policy sampled."""
    temperature: Annotated[float, Field(gt=0, le=4)] = 0.5
    """Sampling temperature of the policy."""
    seed: Seed = 0
    """Seed of all games: another one gives other games."""
    search: SearchSettings = SearchSettings(playouts=_PLAYOUTS)
    """The search, by default with 80 playouts per decision."""

    @field_validator("search", mode="before")
    @classmethod
    def _by_default(cls, search: Any) -> Any:
        return {"playouts": _PLAYOUTS} | search if isinstance(search, dict) else search


def check_label_settings(settings: LabelSettings) -> None:
    """Raises InputError for an unknown player, or a search to which the policy proposes nothing."""
    check_search(settings.search)
    if not settings.search.proposals:
        raise InputError("--search.proposals is 0, so the policy would neither propose nor play: set 1 or more")
    try:
        table = read_table(settings.opponents)
    except ValueError as error:
        raise InputError(str(error).replace("rollouts.", "")) from error
    check_search(settings.search.model_copy(update={"scripted": tuple(name for name, _ in table if name != ITSELF) or ("hold",)}))


def made_by(settings: LabelSettings, policy: Mapping[str, str]) -> dict[str, Any]:
    """What shapes the labels; `policy` identifies weights and prompts."""
    opponents = [name for name, _ in read_table(settings.opponents)]
    return {
        **settings.model_dump(mode="json", exclude={"first_game", "games"}),
        "policy": dict(policy),
        "code": code_of_play((*opponents, *settings.search.scripted, *settings.search.player)),
    }


async def label_file(folder: Path, first_game: int, settings: LabelSettings, policy: PolicyPlayer, about: dict[str, Any]) -> int:
    """Play the file's games and publish their labels; returns how many. 0 if it exists, or another process makes it."""
    path = label_path(folder, first_game)
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock) as mine:
        if not mine:
            return 0
        if path.exists():
            lock.unlink(missing_ok=True)
            return 0
        numbers = range(first_game, first_game + GAMES_A_FILE)
        games = await asyncio.gather(*(label_game(number, settings, policy) for number in numbers))
        labels = [label for game in games for label in game]
        await asyncio.to_thread(publish_alike, folder, first_game, labels, about)
        lock.unlink(missing_ok=True)
    return len(labels)


async def label_game(number: int, settings: LabelSettings, policy: PolicyPlayer) -> list[Label]:
    name = f"label/{settings.seed}/{number}"
    power = POWERS[number % len(POWERS)]
    others = sample_opponents(name, read_table(settings.opponents), [each for each in POWERS if each != power])
    follows = seeded_rng(name, "search").random() < settings.search_share
    labeller = _Labeller(number, settings.search, policy, plays_search=follows)
    plan = ForkPlan(
        name=name,
        shared_name=name,
        seats={power: POLICY} | others,
        horizon_years=settings.years,
        temperature=settings.temperature,
        snapshot_id="",
    )
    played = await play_fork(plan, Board.start(), {POLICY: labeller, f"{POLICY}:0": policy}, record_phases=False)
    if played.status != "complete":
        raise EngineError(f"game {number} failed: {played.reason}")
    return labeller.labels


class _Labeller:
    def __init__(self, game: int, settings: SearchSettings, policy: PolicyPlayer, *, plays_search: bool) -> None:
        self.labels: list[Label] = []
        self._game, self._settings, self._policy, self._plays_search = game, settings, policy, plays_search

    async def decide(self, request: DecisionRequest) -> list[str]:
        proposals = list(await propose(request, self._policy, self._settings))
        found = await search(request.board, request.power, proposals, self._settings, search_seed_name(request))
        position = request.board.snapshot(game_id="", seed=0, source="")
        self.labels.append(
            Label(
                game=self._game,
                phase_index=request.phase_index,
                phase=request.board.phase,
                power=request.power,
                snapshot_id=position.snapshot_id,
                position=position.position,
                orders=["; ".join(orders) for orders in found.proposals],
                values=found.values,
                visits=found.visits,
                best=found.best,
            )
        )
        return found.orders if self._plays_search else list(proposals[0])
