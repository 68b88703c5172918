"""Playouts: continue a game after one order set of one power, with scripted players, and value the end.

A playout is synchronous and gives what `rollouts.fork.play_fork` gives with the same dice. It is faster because it records
nothing, checks no order, and stops where the value cannot change any more. The caller checks that the order set is legal.
"""

from collections.abc import Mapping, Sequence

from game.board import POWERS, Board
from game.players import Player, player
from game.prompt_settings import PromptSettings
from game.prompts import board_text, power_text
from game.scores import Standing, compute_standing, horizon_reached
from rollouts.seeds import dice
from search.settings import SearchSettings

Leaf = tuple[str, str]
"""The prompt at the end of a playout, for a value head: text of the board, and of the power's line."""


def play_out(board: Board, power: str, orders: Sequence[str], name: str, settings: SearchSettings) -> float:
    """Value for `power` after its `orders` and scripted play to the horizon; `board` is not changed.

    Args:
        orders: a legal order set.
        name: seeds the dice of all seats, by phase and power; equal names give equal luck.

    Raises:
        InputError: a name in `settings.player` is no scripted player.
    """
    game = _played_out(board, power, orders, name, settings)
    value = value_of(compute_standing(game), power, settings)
    game.release()
    return value


def reach_leaf(
    board: Board, power: str, orders: Sequence[str], name: str, settings: SearchSettings, prompts: PromptSettings
) -> float | Leaf:
    """As `play_out`, but goes on to the first phase after the horizon that asks the power, and returns its prompt.

    Returns:
        the leaf; a value if the game ends before, or the power is eliminated.
    """
    game = _played_out(board, power, orders, name, settings)
    if game.is_over or not game.is_alive(power):
        end = value_of(compute_standing(game), power, settings)
    else:
        end = board_text(game, power, prompts), power_text(game.legal_orders()[power], game, prompts, cue="")
    game.release()
    return end


def _played_out(board: Board, power: str, orders: Sequence[str], name: str, settings: SearchSettings) -> Board:
    """A fork of `board` at the end of the playout."""
    seats = {seat: player(who) for seat, who in seats_of(name, settings).items()}
    start, given = board.phase, {power: orders}
    game = board.fork()
    while given or not _is_end(start, game, power, settings):
        game.advance(_scripted(game, seats, name, skip=given) | given)
        given = {}
    return game


def _is_end(start: str, board: Board, power: str, settings: SearchSettings) -> bool:
    if not settings.asks_head:
        return horizon_reached(start, board.phase, settings.years) or _no_more_captures(start, board, settings.years)
    if board.is_over or not board.is_alive(power):
        return True
    # A version is asked only where it has a choice, so its head knows no other prompt.
    return horizon_reached(start, board.phase, settings.years) and (
        power in (legal := board.legal_orders()) and not legal[power].is_forced
    )


def seats_of(name: str, settings: SearchSettings) -> dict[str, str]:
    """Who plays each power in the playout `name`: by lot among `settings.player`."""
    lot = dice(name, "seats")
    return {power: lot.choice(settings.player) for power in POWERS}


def value_of(standing: Standing, power: str, settings: SearchSettings) -> float:
    """Value of a standing for `power`: centres (0 to 34), or share of squared centres (0 to 1; 1 after a solo)."""
    return float(standing.centres[POWERS.index(power)]) if settings.counted == "centres" else standing.sos_share(power)


def _scripted(board: Board, seats: Mapping[str, Player], name: str, skip: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Orders of all powers but `skip`, seeded as in a fork."""
    phase, legal = board.phase, board.legal_orders()
    return {power: seats[power](legal[power], dice(name, phase, power), board) for power in legal if power not in skip}


def _no_more_captures(start: str, board: Board, years: int) -> bool:
    """True if no autumn is played before the horizon: centres change hands after autumn only, and both values count centres."""
    return board.phase[0] != "F" and horizon_reached(start, _next_autumn(board), years)


def _next_autumn(board: Board) -> str:
    """The autumn movement phase that follows this phase of spring or winter."""
    return f"F{board.year + (board.season == 'W')}M"
