"""Orders are encoded by line, in the context of their answer; each text is tokenised once."""

import shutil
from pathlib import Path

import pytest

from entente.decoding.codec import Codec
from entente.decoding.model_files import end_token_ids, resolve_model
from entente.game.board import Board
from entente.game.prompts import board_text
from entente.players.policy import Tokens
from entente.telemetry.errors import InputError
from tests.chat_models import set_config


def test_text_after_other_text_is_spelled_as_in_the_whole_or_not_at_all(tokens: Tokens):
    codec = tokens.codec
    assert codec.encode_after("A PAR\n", "F BRE") == codec.encode("A PAR\nF BRE")[len(codec.encode("A PAR\n")) :]
    assert codec.encode_after("A PA", "R - BUR\n") is None, "the tokenizer merges letters over this seam"


def test_no_board_and_no_order_is_tokenised_twice(model: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    encode = Codec.encode
    monkeypatch.setattr(Codec, "encode", lambda self, text: seen.append(text) or encode(self, text))
    tokens, board = Tokens(Codec(model)), Board.start()
    board.step({})
    seen.clear()
    powers = ("FRANCE MOVEMENT A PAR\n", "TURKEY MOVEMENT A CON\n")
    for power in (*powers, *powers):
        tokens.form.ids(board_text(board, "FRANCE"), power)
        tokens.codec.encode_order("F LYO - TUN")
    for part in (board_text(board, "FRANCE"), *powers, "F LYO - TUN\n"):
        assert sum(part in text for text in seen) == 1, part
    assert not any("Diplomacy without press" in text for text in seen), "the rules"


class Bytes(Codec):
    """One id per byte, except where a text is to be spelled otherwise."""

    def __init__(self, instead: dict[str, str]) -> None:
        self._instead = instead
        self._prepare(end_ids=(ord("$"),), vocabulary_size=256)

    def encode(self, text: str) -> tuple[int, ...]:
        for written, spelled in self._instead.items():
            text = text.replace(written, spelled)
        return tuple(text.encode())


@pytest.mark.parametrize(
    ("instead", "sentence"),
    [
        ({"A PAR S": ""}, "encodes order '.*' as nothing"),
        ({"A PAR S": "A$"}, "with a token that ends an order"),
        ({"BRE\nA PAR S": "BRE\nAPAR S"}, "encodes order '.*' differently at the ends of a line"),
        ({"BRE\n": "BR\n"}, "encodes order '.*' differently at the ends of a line"),
    ],
    ids=["nothing", "the end mark", "after a line break", "before a line break"],
)
def test_an_order_that_has_no_spelling_of_its_own_is_refused(instead: dict[str, str], sentence: str):
    codec = Bytes(instead)
    assert codec.encode_order("F BRE H") == tuple(b"F BRE H")
    with pytest.raises(InputError, match=sentence):
        codec.encode_order("A PAR S" if "A PAR S" in instead else "A PAR S F BRE")


@pytest.mark.parametrize("spelled", ["PAR H##", "PAR &"], ids=["two tokens", "merged"])
def test_a_line_break_that_is_not_a_token_of_its_own_is_refused(spelled: str):
    with pytest.raises(InputError, match="does not encode the line break after an order as one token of its own"):
        Bytes({"PAR H\n": spelled})


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_model_folder_without_what_decoding_needs_is_named(model: Path, tmp_path: Path, missing: str):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(InputError, match=missing):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["./nowhere", "no-such-thing"])
def test_a_model_that_is_nowhere_is_refused_without_asking_the_hub(name: str):
    with pytest.raises(InputError, match="neither a folder"):
        resolve_model(name)


def test_a_config_without_an_end_token_is_refused(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        set_config(tmp_path / "model", name, eos_token_id=None)
    with pytest.raises(InputError, match="eos_token_id"):
        end_token_ids(tmp_path / "model")
