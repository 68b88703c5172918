"""A message has one position, or is refused in a sentence with status 400; which positions are read: test_positions.py."""

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


@pytest.mark.parametrize("content", [{"state": STATE, "game": None}, {"game": GAME, "state": None}], ids=["state", "game"])
def test_a_null_beside_a_position_is_none(content: dict[str, Any]):
    assert ask(**content)[1] == Board.start().legal_orders()["FRANCE"]


@pytest.mark.parametrize(
    "content",
    [{"state": STATE | {"name": "COMPLETED"}}, {"state": STATE | {"units": {"FRANCE": []}}}, {"state": STATE, "game": GAME}, {}],
    ids=["impossible", "nothing to order", "two", "none"],
)
def test_what_is_no_position_of_the_power_is_refused_in_a_sentence(content: dict[str, Any]):
    with pytest.raises(ApiError) as refused:
        ask(**content)
    assert refused.value.status == 400 and "\n" not in str(refused.value) and len(str(refused.value)) < 400
