"""What a policy version is asked follows from the position alone, whatever was asked before."""

from pathlib import Path

import pytest

from entente.decoding.codec import Codec
from entente.game.board import Board
from entente.game.prompts import PromptSettings
from entente.players.policy import Tokens


@pytest.mark.parametrize("own_line", ["in_place", "last"])
def test_a_prompt_shows_its_own_board_phase_and_power(model: Path, own_line: str):
    """Oracle: tokens that wrote no prompt before. Forks of a group are in the same phase, and are asked in turn."""
    settings = PromptSettings(own_line=own_line)  # type: ignore[arg-type]
    kept, start = Tokens(Codec(model), settings), Board.start()
    moved, held = start.fork(), start.fork()
    moved.step({"FRANCE": ["A PAR - BUR", "A MAR H", "F BRE H"]})
    held.step({})
    assert moved.phase == held.phase != start.phase
    prompts = set()
    for board in (start, moved, held, moved):
        for power in ("FRANCE", "ITALY"):
            legal = board.legal_orders()[power]
            prompt = kept.prompt_ids(board, legal)
            assert prompt == Tokens(kept.codec, settings).prompt_ids(board, legal)
            prompts.add(tuple(prompt))
    assert len(prompts) == 6
    moved.step({})
    legal = moved.legal_orders()["FRANCE"]
    assert kept.prompt_ids(moved, legal) == Tokens(kept.codec, settings).prompt_ids(moved, legal)
