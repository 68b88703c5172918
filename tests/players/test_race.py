"""A race: equal scenarios for all, early ends of the worse, changes of the best, and no playout twice."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from entente.players.race import Raced, race

Changes = Callable[[str], Sequence[str]]


def raced(
    candidates: str, value: Callable[[str, int], float], changes: Changes = lambda _: (), playouts: int = 1000
) -> tuple[Raced[str], Counter[tuple[str, int]]]:
    """A race of letters over 8 scenarios, and how often each was played where."""
    played = Counter[tuple[str, int]]()

    async def play(candidate: str, scenario: int) -> float:
        played[candidate, scenario] += 1
        return value(candidate, scenario)

    return asyncio.run(race(list(candidates), changes, playouts=playouts, scenarios=8, play=play)), played


def test_a_challenger_wins_only_if_it_is_ahead_over_all_scenarios():
    value = {"a": [1.0] * 8, "b": [9.0] * 4 + [-8.0] * 4, "c": [1.0] * 7 + [2.0]}
    found, _ = raced("abc", lambda who, scenario: value[who][scenario])
    assert found.best == "a" and len(found.values["b"]) == 8, "it was ahead after the second heat, and is behind at the end"
    assert len(found.values["c"]) == 4, "equal in the second heat"
    value["c"][0] = 1.5
    assert raced("abc", lambda who, scenario: value[who][scenario])[0].best == "c"


def test_who_is_behind_after_two_scenarios_plays_no_third_and_nothing_is_played_twice():
    found, played = raced("azyxm", lambda who, _: ord(who))
    assert found.best == "z" and max(played.values()) == 1
    assert {who: len(values) for who, values in found.values.items()} == {"a": 8, "z": 8, "y": 2, "x": 2, "m": 2}


def test_each_candidate_meets_the_scenarios_by_number():
    luck = [5.0, -3.0, 2.0, 0.0, 7.0, 1.0, -1.0, 4.0]
    found, _ = raced("ab", lambda who, scenario: luck[scenario] + (who == "b"))
    assert found.best == "b" and found.values == {"a": luck, "b": [each + 1 for each in luck]}


def test_changes_of_the_best_race_until_nothing_near_it_is_better():
    def near(best: str) -> list[str]:
        return [chr(ord(best) + step) for step in (-1, 0, 1)]

    found, played = raced("ad", lambda who, _: -abs(ord(who) - ord("k")), near)
    assert found.best == "k" and max(played.values()) == 1
    assert set(found.values) == set("adcefghijkl") and played["m", 0] == 0, "each new best has changes of its own"


def test_all_candidates_race_and_no_change_enters_after_the_last_playout():
    found, _ = raced("abcdefgh", lambda _, scenario: float(scenario), lambda best: "xyz", playouts=3)
    assert set(found.values) == set("abcdefgh") and found.best == "a", "in a tie the first"
    assert len(found.values["a"]) == 8, "the best has a value over all scenarios"


def test_a_candidate_alone_is_not_played():
    found, played = raced("a", lambda *_: 1.0)
    assert (found.best, found.values, played) == ("a", {"a": []}, Counter())
