"""The environment keeps PettingZoo's contract, plays our rules, and pays our components."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.game_ground import Notes, played_games
from entente.game.board import Board
from entente.game.positions import board_of
from entente.game.read_prompt import read_prompt
from entente.game.scores import PowerScores, components
from entente.game.snapshot import POWERS, Snapshot

pytest.importorskip("pettingzoo", reason="PettingZoo is not installed: the extra `pettingzoo` brings it")
from pettingzoo.test import api_test, render_test, seed_test

from entente.integrations.board_features import CHANNELS, PHASE_KINDS, PROVINCES, province_rows
from entente.integrations.pettingzoo_env import REWARDS, DiplomacyEnv, env
from entente.integrations.unit_actions import PASS, UnitChoices, action_of, action_texts
from entente.telemetry.errors import InputError

quiet = pytest.mark.filterwarnings(
    # Of PettingZoo's test: it warns of every space but a Box, of names without a number, and of the empty mask of who is out.
    "ignore:Observation space for each agent probably should be",
    "ignore:We recommend agents to be named",
    "ignore:Action mask numpy array is all zeros",
    "ignore:Observation is not a NumPy array",
)


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


@quiet
def test_the_contract_of_pettingzoo_is_kept(positions: list[Snapshot], capsys: pytest.CaptureFixture[str]):
    api_test(env(years=2), num_cycles=150)
    api_test(env(positions=positions, years=1), num_cycles=100)
    seed_test(lambda: env(positions=positions, years=1), num_cycles=50)
    make: Any = lambda render_mode: env(years=1, render_mode=render_mode)  # noqa: E731
    render_test(make, {"svg": lambda picture: picture.startswith("<svg")})
    assert "SPRING 1901 MOVEMENT" in capsys.readouterr().out


def play(environment: DiplomacyEnv, rng: random.Random) -> dict[str, float]:
    """Play a game at random; returns the sum of each agent's rewards."""
    totals = dict.fromkeys(environment.agents, 0.0)
    for agent in environment.agent_iter():
        observation, reward, terminated, truncated, _ = environment.last()
        totals[agent] += reward
        if terminated or truncated:
            environment.step(None)
        else:
            assert observation is not None
            environment.step(int(rng.choice(np.flatnonzero(observation["action_mask"]))))
    return totals


@pytest.mark.parametrize("reward", REWARDS)
def test_rewards_add_up_to_the_component_from_start_to_end(reward: str):
    environment = env(years=4, reward=reward)
    environment.reset()
    before = PowerScores(centres=environment.position().centres)
    totals = play(environment, random.Random(1))
    end = environment.position()
    after = PowerScores(centres=end.centres)
    assert before != after and end.phase == "W1904A"  # the last winter is not played
    expected = {power: components(before, after, power)[reward] for power in POWERS}
    assert totals == pytest.approx(expected)


def test_a_recorded_game_is_played_alike_and_a_power_without_anything_is_out():
    notes, end = played_games(60, seed=2)[2]
    environment, out = env(years=100), []
    environment.reset()
    for action in actions_of(notes):
        while environment.last()[2]:
            out.append(environment.agent_selection)
            environment.step(None)
        environment.step(action)
    found = environment.position()
    assert found.phase + found.position == end
    assert out == ["AUSTRIA"] and "AUSTRIA" not in environment.agents


def test_a_game_that_starts_with_forced_disbands_alone_begins_with_the_phase_after_them():
    units = {"FRANCE": ["A MUN", "A GAS"], "ITALY": ["A ROM"]}
    start = board_of("W1905A", units, {}, {"ITALY": ["ROM"]}).snapshot(game_id="", seed=0, source="")
    environment = env(positions=[start])
    for _ in range(2):
        environment.reset()
        assert environment.agent_selection == "FRANCE" and environment.last()[2], "it is out"
        environment.step(None)
        assert (environment.position().phase, environment.agents, environment.agent_selection) == ("S1906M", ["ITALY"], "ITALY")


def test_an_observation_says_the_position_in_text_and_in_numbers(positions: list[Snapshot]):
    environment = env(positions=positions)
    environment.reset(options={"snapshot": positions[3].snapshot_id})
    board, agent = Board.restore(positions[3]), environment.agent_selection
    observation = environment.observe(agent)
    power, shown = read_prompt(observation["text"])
    assert power == agent
    assert (shown.units(), shown.centres(), shown.phase) == (board.units(), board.centres(), board.phase)
    table = observation["observation"][: PROVINCES * len(CHANNELS)].reshape(PROVINCES, -1)
    names = {row: name for name, row in province_rows().items()}
    for number, power in enumerate(POWERS):
        units = {
            f"{'F' if table[row, 1] else 'A'} {names[row]}"
            for row in np.flatnonzero(table[:, CHANNELS.index(f"unit of {power}")])
        }
        assert units == {unit[:5] for unit in board.units()[power]}
        owned = np.flatnonzero(table[:, CHANNELS.index(f"centre of {power}")])
        assert {names[row] for row in owned} == set(board.centres()[power])
        assert observation["observation"][PROVINCES * len(CHANNELS) + number] == (power == agent)
    asked = np.flatnonzero(table[:, CHANNELS.index("asked now")])
    assert [names[row] for row in asked] == [board.legal_orders()[agent].sites[0][2:5]]
    assert table[:, CHANNELS.index("centre")].sum() == 34
    kinds = observation["observation"][-1 - len(PHASE_KINDS) : -1]
    assert PHASE_KINDS[kinds.argmax()] == board.season + "M" and kinds.sum() == 1 and observation["observation"][-1] == 0


def test_orders_of_the_phase_are_seen_by_their_own_power_alone():
    environment = env()
    environment.reset()
    others = environment.observe("FRANCE")["text"]
    environment.step(action_of("A BUD - SER"))
    observation = environment.observe("AUSTRIA")
    assert observation["text"].endswith("ORDERS:\nA BUD - SER\n") and environment.observe("FRANCE")["text"] == others
    row = province_rows()["SER"] * len(CHANNELS)
    assert observation["observation"][row + CHANNELS.index("led to by own orders of this phase")] == 1
    asked = {action_texts()[action] for action in np.flatnonzero(observation["action_mask"])}
    legal = Board.start().legal_orders()["AUSTRIA"]
    assert asked == {action_texts()[action_of(order)] for order in legal.options[legal.sites.index("F TRI")]}


def test_what_cannot_be_used_is_refused_in_a_sentence(positions: list[Snapshot]):
    with pytest.raises(InputError, match=r"^101 game years cannot be played: give 1 to 100"):
        env(years=101)
    with pytest.raises(InputError, match=r"^there is no reward 'score': choose one of centres_gained, "):
        env(reward="score")
    with pytest.raises(InputError, match=r"^there is no render mode 'rgb_array'"):
        env(render_mode="rgb_array")
    environment = env(positions=positions)
    with pytest.raises(InputError, match=r"^no game is being played: call reset\(\) first"):
        environment.step(0)
    with pytest.raises(InputError, match=r"^there is no snapshot 'elsewhere' among the 8 positions"):
        environment.reset(options={"snapshot": "elsewhere"})
    environment = env()
    environment.reset()
    masked = action_of("A BUD - PAR")
    with pytest.raises(InputError, match=rf"^action {masked} \(PAR\) is masked for A BUD of AUSTRIA in S1901M: sample one where"):
        environment.step(masked)
    assert environment.observe("AUSTRIA")["text"].endswith("ORDERS:\n")
    with pytest.raises(InputError, match=r"^action 99999 "):
        environment.step(99999)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()


def test_the_page_says_how_wide_a_province_is():
    assert f"{len(CHANNELS)} numbers for each of {PROVINCES} provinces" in PAGE and len(province_rows()) == PROVINCES


def test_the_example_of_the_page_plays_a_game():
    (example,) = re.findall(r"^```python pettingzoo_game.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    assert not names["environment"].agents and names["environment"].position().phase == "W1902A"
