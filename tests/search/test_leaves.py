"""A value head at the end of playouts: the search picks what it prefers, asked only where a version would be asked."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from decoding.model_files import base_identity
from game.board import Board
from game.players import player
from inference.settings import InferenceSettings
from inference.value_reader import ValueReader
from records.policy_version import BASE
from records.value_head import CENTRES_SCALE, HeadWeights, base_head, write_head
from rollouts.deciders import DecisionRequest, Tokens
from search.leaves import Leaves
from search.playouts import play_out, reach_leaf
from search.search import check_search, search
from search.settings import SearchSettings
from telemetry.errors import InputError

AT_ONCE = SearchSettings(proposals=2, playouts=2, player=("hold",), years=0, value="head_centres")
"""The head values the position right after the phase."""


@pytest.fixture
def autumn() -> DecisionRequest:
    """Autumn 1901, a French army next to an empty centre; Turkey holds one and will build."""
    board, rng = Board.start(), random.Random(0)
    held = {power: player("hold")(legal, rng) for power, legal in board.legal_orders().items()}
    board.step(held | {"FRANCE": ["A PAR - PIC"], "TURKEY": ["A CON - BUL"]})
    legal = board.legal_orders()["FRANCE"]
    return DecisionRequest(game="g", dice="g", ply=0, power="FRANCE", legal=legal, board=board, snapshot_id="")


def sets_of(request: DecisionRequest) -> list[list[str]]:
    return [
        [f"{site} H" for site in request.legal.sites],
        [f"{site} - BEL" if "PIC" in site else f"{site} H" for site in request.legal.sites],
    ]


def head_of(weight: np.ndarray, bias: float) -> HeadWeights:
    """A head whose second output is `weight` times the normed state plus `bias`."""
    width = len(weight)
    both = np.stack([np.zeros(width), weight]).astype(np.float32)
    ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
    return HeadWeights(norm_weight=ones, norm_bias=zeros, weight=both, bias=np.array([0.5, bias], np.float32))


@pytest.mark.parametrize("preferred", [0, 1], ids=["the quiet set", "the set that takes a centre"])
def test_a_search_picks_what_the_head_prefers(
    autumn: DecisionRequest, model: Path, tokens: Tokens, tmp_path: Path, preferred: int
):
    """The head's weights are the difference of the normed states after the two sets."""
    sets, base = sets_of(autumn), shutil.copytree(model, tmp_path / "base")
    leaves = [reach_leaf(autumn.board, "FRANCE", orders, "n", AT_ONCE, tokens.prompts) for orders in sets]
    assert all(isinstance(leaf, tuple) for leaf in leaves)
    prompts = [tokens.form.ids(*leaf) for leaf in leaves]
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    write_head(base_head(base), head_of(np.zeros(width), 0.0), base_identity(base))
    states = ValueReader(base, BASE, InferenceSettings(engine="torch"))._states([np.array(ids, np.int32) for ids in prompts])
    normed = (states - states.mean(1, keepdims=True)) / states.std(1, keepdims=True)
    write_head(base_head(base), head_of(normed[preferred] - normed[1 - preferred], 0.0), base_identity(base))
    reader = ValueReader(base, BASE, InferenceSettings(engine="torch"))
    found = asyncio.run(search(autumn, sets, AT_ONCE, leaves=Leaves(reader, tokens)))
    assert found.best == preferred and found.values[preferred] > found.values[1 - preferred]
    assert found.values == pytest.approx((reader.read(prompts)[:, 1] * CENTRES_SCALE).tolist(), rel=1e-4)


def test_a_leaf_lies_where_the_power_is_asked(autumn: DecisionRequest, tokens: Tokens):
    quiet, take = sets_of(autumn)
    build = reach_leaf(autumn.board, "FRANCE", take, "n", AT_ONCE, tokens.prompts)
    spring = reach_leaf(autumn.board, "FRANCE", quiet, "n", AT_ONCE, tokens.prompts)
    assert isinstance(build, tuple) and isinstance(spring, tuple)
    assert build[0].startswith("WINTER 1901 ADJUSTMENTS") and spring[0].startswith("SPRING 1902 MOVEMENT")


def test_a_game_that_is_lost_needs_no_head(autumn: DecisionRequest, tokens: Tokens, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Board, "is_alive", lambda self, power: False)
    end = reach_leaf(autumn.board, "FRANCE", sets_of(autumn)[0], "n", AT_ONCE, tokens.prompts)
    assert end == play_out(autumn.board, "FRANCE", sets_of(autumn)[0], "n", SearchSettings(player=("hold",)))


def test_only_a_version_has_a_head_and_only_scripted_players_lead_to_it():
    with pytest.raises(InputError, match="'head_centres' asks the value head of a version that searches"):
        check_search(AT_ONCE, has_policy=False)
    with pytest.raises(ValidationError, match="needs scripted players"):
        SearchSettings(value="head_squares", player=("policy",))
    with pytest.raises(ValidationError, match=r"search\.years 0 counts nothing"):
        SearchSettings(years=0)
