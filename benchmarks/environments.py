"""What the PettingZoo environment costs beside our own board: `python -m benchmarks.environments [PHASES]`.

Scripted games are recorded once. Then two arms play the same orders in turn: the board, with its legal orders once a phase, and
the environment, which is asked for an observation before each unit's action. The environment must reach the position that was
recorded. `ratio` is the board's CPU seconds over the environment's, the median over ROUNDS rounds: at 0.5 the environment steps
half as fast. The output is one JSON object.
"""

import argparse
import json
import sys
from statistics import median

from benchmarks.game_ground import Notes, played_games
from benchmarks.outcome import cpu_seconds, require_found
from game.board import Board
from integrations.pettingzoo_env import MOST_YEARS, env
from integrations.unit_actions import PASS, UnitChoices, action_of, action_texts

ROUNDS = 5


def actions_of(notes: Notes) -> list[int]:
    """The actions with which the environment plays a recorded game: units with one legal order alone are not asked."""
    board, waiting, actions = Board.start(), action_texts().index(PASS), list[int]()
    for orders in notes:
        for power, legal in board.legal_orders().items():
            choices = UnitChoices(legal)
            while not choices.is_done:
                order = next((order for order in orders[power] if order in legal.options[choices.site]), None)
                actions.append(waiting if order is None else action_of(order))
                choices.take(actions[-1])
        board.step(orders)
    return actions


def measure(phases: int) -> dict[str, float]:
    """Medians over the rounds, after one that warms both arms."""
    games = [(notes, end, actions_of(notes)) for notes, end in played_games(phases, seed=0)]
    count, environment, ratios, rates = (
        sum(len(notes) for notes, _, _ in games),
        env(years=MOST_YEARS),
        list[float](),
        list[float](),
    )
    for _ in range(ROUNDS + 1):
        ours = theirs = 0.0
        for notes, end, actions in games:
            board = Board.start()

            def play_board(board: Board = board, notes: Notes = notes) -> None:
                for orders in notes:
                    board.legal_orders()
                    board.step(orders)

            def play_environment(actions: list[int] = actions) -> None:
                environment.reset()
                for action in actions:
                    while environment.last()[2]:  # a power that is out of the game is asked once more, for nothing
                        environment.step(None)
                    environment.step(action)

            ours += cpu_seconds(play_board)
            theirs += cpu_seconds(play_environment)
            shown = environment.position()
            require_found(end == shown.phase + shown.position, "the recorded position at the end of the environment's game")
        ratios.append(ours / theirs)
        rates.append(count / theirs)
    actions = sum(len(actions) for _, _, actions in games)
    return {"ratio": median(ratios[1:]), "phases_per_s": median(rates[1:]), "actions_per_phase": actions / count, "phases": count}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.environments", description="The environment's speed beside our board's."
    )
    parser.add_argument("phases", type=int, nargs="?", default=600, help="phases of recorded games (%(default)s)")
    found = measure(parser.parse_args().phases)
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in found.items()}) + "\n")
