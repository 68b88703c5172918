"""`entente verify-card`: check a result card, and play its games again."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from cli.options import AsJson, RunsRoot
from telemetry.plain_text import shown

if TYPE_CHECKING:
    from evaluation.result_card import ResultCard
    from flows.verify_card import Verification

_SHOWN = 20
"""Games that differ, of which a line is shown."""


def verify_card(
    file: Path,
    /,
    *,
    share: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1), help="Share of the games to play again.")] = 1.0,
    seed: Annotated[int | None, Parameter(help="Which games are a share; default: by lot, and it is shown.")] = None,
    players: Annotated[
        list[str] | None,
        Parameter(
            help="Where a player of the card is on this machine, as its/name=models/small or its/name=mine:v20.", negative=""
        ),
    ] = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Check a result card, and play its games again, all of them or a share chosen by lot.

    The exit code is 0 if all games are equal, 1 if one differs, and 2 if the card was changed or cannot be read. Games are
    compared phase by phase. They are equal on a machine of the same kind with the same versions; else it is said what is
    otherwise. The card's models are found on this machine by their hashes. An interrupted verification goes on when the same
    command is given again.

    Examples

        entente verify-card result.json

        entente verify-card result.json --share 0.1 --seed 7

        entente verify-card result.json --players models/small=downloads/small
    """
    from contextlib import nullcontext

    from cli.prefect_server import prefect_server
    from cli.run_flow import run_flow
    from cli.screen import progress_shown
    from evaluation.result_card import environment_differences, playing_environment, read_card
    from flows.verify_card import verify_card as verify
    from pipeline.card_of_match import find_card_players

    card = read_card(file)
    found, notes = find_card_players(card.players, _given(players or []), runs_root)
    here = playing_environment()
    notes = [*environment_differences(card, here), *notes]
    if not json:
        _describe(card, notes)
    around = prefect_server() if any(player.run for player in found) else nullcontext()  # a run may have to make its tiny model
    with around, progress_shown():
        result = run_flow(verify(card, found, runs_root, here, share, seed))
    if json:
        facts = {"games": result.games, "of": len(card.games), "seed": result.seed, "different": result.different}
        print(jsonlib.dumps({"card": str(file), "checksum": card.checksum, "otherwise_here": notes, **facts}))
    else:
        _show(card, result, share)
    if result.different:
        raise SystemExit(1)


def _given(players: list[str]) -> dict[str, str]:
    from telemetry.errors import InputError

    pairs = [each.partition("=") for each in players]
    if wrong := next((name for name, sign, here in pairs if not (name and sign and here)), None):
        raise InputError(f"--players takes the card's name and where it is here, as {wrong}=models/small")
    return {name: here for name, _, here in pairs}


def _say(sentence: str) -> None:
    """Print a sentence; a card may hold any text."""
    print(shown(sentence))


def _describe(card: "ResultCard", notes: list[str]) -> None:
    settings = card.settings
    seats = f"one seat against six of '{settings.opponents}'" if settings.opponents else "one table"
    how = settings.how((*settings.players, settings.opponents))
    _say(f"{len(card.games)} games of {', '.join(settings.players)}, {seats}, {settings.years} years{how and '; ' + how}")
    _say("the card follows from itself: checksum, seats, and the table from the games")
    if not card.environments:
        _say("it does not say where its games were played: an earlier release played them")
    elif len(card.environments) > 1:
        _say(f"its games were played in {len(card.environments)} environments; the newest is compared")
    for note in notes:
        _say(f"otherwise here: {note}")


def _show(card: "ResultCard", result: "Verification", share: float) -> None:
    for key, phase in list(result.different.items())[:_SHOWN]:
        where = "in its result" if phase == "the end" else f"from {phase} on"
        _say(f"game {key} differs {where}")
    if len(result.different) > _SHOWN:
        _say(f"and {len(result.different) - _SHOWN} more")
    chosen = f", chosen by --seed {result.seed}" if share < 1 else ""
    equal = result.games - len(result.different)
    _say(f"{result.games} of {len(card.games)} games were played again{chosen}: {equal} equal, {len(result.different)} different")
