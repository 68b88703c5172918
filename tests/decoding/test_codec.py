"""Prompts are encoded by segment and orders by line; each text is tokenised once."""

import json
import shutil
from pathlib import Path

import pytest

from decoding.codec import Codec
from decoding.model_files import eos_token_id, model_fingerprint, resolve_model
from game.board import Board
from game.prompts import board_text, power_text, rules_text
from telemetry.errors import InputError


def test_a_prompt_is_its_segments_so_powers_of_one_board_share_their_leading_ids(model: Path):
    codec, board = Codec(model), Board.start()
    legal = board.legal_orders()
    prompts = [
        codec.encode_prompt((rules_text(), board_text(board), power_text(legal[power], board))) for power in ("FRANCE", "TURKEY")
    ]
    shared = codec.encode_prompt((rules_text(), board_text(board)))
    assert prompts[0][: len(shared)] == shared == prompts[1][: len(shared)]
    assert prompts[0] != prompts[1]
    assert codec.decode(prompts[0]) == rules_text() + board_text(board) + power_text(legal["FRANCE"], board)


def test_a_piece_has_the_same_ids_whatever_stands_before_it(tokens):
    """A tokenizer would merge letters over the seam."""
    parts = "A PA", "R - BUR\n"
    alone = [tokens.codec.encode_prompt([part]) for part in parts]
    assert tokens.codec.encode_prompt(parts) == alone[0] + alone[1] != tokens.codec.encode_prompt(["".join(parts)])


def test_no_text_is_tokenised_twice(model: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    encode = Codec._encode
    monkeypatch.setattr(Codec, "_encode", lambda self, text: seen.append(text) or encode(self, text))
    codec = Codec(model)
    for _ in range(3):
        codec.encode_prompt(("rules\n", "board\n", "FRANCE\n"))
        codec.encode_order("A PAR - BUR")
    assert sorted(seen) == sorted(["rules\n", "board\n", "FRANCE\n", "A PAR - BUR"])


def test_the_separator_is_one_token_that_no_order_contains(model: Path):
    codec = Codec(model)
    assert codec.decode([codec.separator_id]) == "\n"
    for order in ("A PAR - BUR", "F STP/SC B", "A LON - BEL VIA", "WAIVE"):
        assert codec.separator_id not in codec.encode_order(order)
        assert codec.decode(codec.encode_order(order)) == order


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_model_folder_without_what_decoding_needs_is_named(model: Path, tmp_path: Path, missing: str):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(InputError, match=missing):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["./nowhere", "no-such-thing", "/nowhere/at/all"])
def test_a_model_that_is_nowhere_is_refused_without_asking_the_hub(name: str):
    with pytest.raises(InputError, match="neither a folder"):
        resolve_model(name)


def test_a_config_without_an_end_token_is_refused(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        if file.exists():
            file.write_text(
                json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "eos_token_id"})
            )
    with pytest.raises(InputError, match="eos_token_id"):
        eos_token_id(tmp_path / "model")


def test_the_fingerprint_tells_models_apart(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    assert model_fingerprint(tmp_path / "model") == model_fingerprint(model)
    (tmp_path / "model" / "config.json").write_text((model / "config.json").read_text().replace("0.02", "0.03"))
    assert model_fingerprint(tmp_path / "model") != model_fingerprint(model)
