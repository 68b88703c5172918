"""Sequential halving: its budget, its rounds, its paired dice, and which arm is the best."""

import asyncio
import math

import pytest

from entente.players.halving import Halved, halve


def halved(values, budget: int) -> tuple[Halved, list[list[tuple[int, int]]]]:
    """Result and rounds for `values(arm, dice number)` of as many arms as `values.arms`, or of a list of constants."""
    rounds: list[list[tuple[int, int]]] = []
    of = values if callable(values) else lambda arm, number: values[arm]

    async def play_round(pulls):
        rounds.append(list(pulls))
        return [of(arm, number) for arm, number in pulls]

    arms = values.arms if callable(values) else len(values)
    return asyncio.run(halve(arms, budget, play_round)), rounds


def test_rounds_are_those_of_the_paper_where_the_budget_divides():
    """Eight arms, 48 playouts, three rounds: 2 for each of eight, 4 for each of four, 8 for each of two."""
    found, rounds = halved([0, 1, 2, 3, 4, 5, 6, 7], 48)
    assert [len(pulls) for pulls in rounds] == [16, 16, 16]
    assert found.visits == (2, 2, 2, 2, 6, 6, 14, 14) and found.best == 7
    assert found.values == (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("arms", [1, 2, 3, 8, 17])
def test_the_budget_is_never_exceeded_and_each_arm_is_played(arms: int):
    for budget in range(arms, 6 * arms):
        found, _ = halved([math.sin(9 * arm) for arm in range(arms)], budget)
        assert arms <= sum(found.visits) <= budget and min(found.visits) >= 1
        assert found.best == max(range(arms), key=lambda arm: math.sin(9 * arm))


def test_two_arms_take_the_whole_budget():
    assert halved([1, 2], 7)[0].visits == (3, 3)
    assert halved([1, 2, 0], 10)[0].visits == (4, 4, 1), "one each in two rounds of three arms, then the rest for two"


def test_playout_k_of_every_arm_has_the_dice_number_k():
    _, rounds = halved([3, 1, 4, 1, 5], 40)
    pulls = [pull for each in rounds for pull in each]
    for arm in range(5):
        numbers = [number for who, number in pulls if who == arm]
        assert numbers == list(range(len(numbers)))
    for each in rounds:
        by_arm = [[number for who, number in each if who == arm] for arm in {arm for arm, _ in each}]
        assert all(numbers == by_arm[0] for numbers in by_arm), "arms of one round meet the same dice"


def test_the_best_has_the_largest_mean_of_the_last_round():
    """Arm 0 shines under dice 0 only, and arm 1 is behind arm 2 in the mean of all their dice."""

    def values(arm: int, number: int) -> float:
        return {0: 9.0 if number == 0 else 0.0, 1: 5.0, 2: 6.0, 3: 1.0}[arm]

    values.arms = 4
    found, _ = halved(values, 24)
    assert found.best == 2 and found.visits[2] == max(found.visits)
    assert halved([1.0, 2.0], 2)[0].best == 1 and halved([2.0, 2.0], 2)[0].best == 0, "in a tie the first"
