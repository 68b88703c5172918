"""What other programs send as a position is read, or refused in a sentence with status 400."""

import json
from typing import Any

import pytest

from entente.game.board import Board
from entente.game.recorded import as_recorded
from entente.live_games.orders_request import ApiError, read_question, read_request

GAME = json.loads(as_recorded("start", [], Board.start()))
STATE = GAME["phases"][0]["state"]


def ask(**content: Any) -> tuple[Board, Any]:
    message = {"role": "user", "content": json.dumps({"power": "FRANCE"} | content)}
    return read_question(read_request(json.dumps({"model": "mine", "messages": [message]}).encode()))


@pytest.mark.parametrize(
    "content",
    [
        {"state": STATE, "game": None},
        {"game": GAME, "state": None},
        {"game": GAME | {"phases": [{"name": "S1901M", "state": {**STATE, "name": None}}]}},
        {"state": STATE | {"retreats": None, "influence": 7, "turn": "spring"}},
        {"state": STATE | {"units": {power.lower(): own for power, own in STATE["units"].items()} | {"NEUTRAL": []}}},
    ],
    ids=["null", "null-state", "named-by-the-phase", "other-fields", "small-letters"],
)
def test_positions_of_other_programs_are_read(content: dict[str, Any]):
    assert ask(**content)[1] == Board.start().legal_orders()["FRANCE"]


def test_a_state_that_the_package_writes_after_a_dislodgement_by_convoy_is_answered():
    """It lists the province from which the attack was supported, and one where units bounced."""
    units = {"ENGLAND": ["F NTH", "A PIC", "A BEL"], "FRANCE": ["*A BEL"], "GERMANY": ["A MUN"], "ITALY": ["A MAR"]}
    retreats = {"FRANCE": {"A BEL": ["BUR", "HOL", "PIC", "RUH"]}}
    _, legal = ask(state=STATE | {"name": "S1901R", "units": units, "retreats": retreats})
    assert legal.options == (("A BEL D", "A BEL R BUR", "A BEL R HOL", "A BEL R RUH"),)


@pytest.mark.parametrize(
    "content",
    [
        {"state": STATE | {"units": {"FRANCE": ["A PAR"], "GERMANY": ["F PAR"]}}},
        {"state": STATE | {"units": {"FRANCE": ["A MAO"]}}},
        {"state": STATE | {"name": "COMPLETED"}},
        {"state": STATE | {"name": "FORMING"}},
        {"state": STATE | {"centers": 7}},
        {"state": STATE | {"units": {"FRANCE": []}}},
        {"state": []},
        {"game": {"phases": [{"name": "S1901M"}]}},
        {"state": STATE, "game": GAME},
        {},
    ],
    ids=range(10),
)
def test_a_position_that_contradicts_itself_is_refused_in_a_sentence(content: dict[str, Any]):
    with pytest.raises(ApiError) as refused:
        ask(**content)
    assert refused.value.status == 400 and "\n" not in str(refused.value) and len(str(refused.value)) < 400
