"""A tokenizer and its special tokens are those that `AutoTokenizer` reads, whatever class or file names them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from entente.decoding.architectures import FAMILIES
from entente.decoding.codec import Codec
from entente.decoding.read_tokenizer import read_tokenizer
from entente.game.board import Board
from entente.game.prompts import ANSWER_CUE, PromptSettings
from entente.players.policy import Tokens
from entente.telemetry.errors import InputError
from tests.chat_models import LLAMA, set_config
from tests.decoding.test_chat_format import parts

TEXT = "<s>A PAR - BUR\n  F BRE H</s><extra>"
CLASSES = (
    None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer",
    "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "NoSuchTokenizer",
)  # fmt: skip
MARKS = ("<unk>", "<s>", "</s>")


def bytes_of_text() -> Tokenizer:
    """In the manner of GPT-2: one id per byte."""
    letters = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def letters_of_text() -> Tokenizer:
    """In the manner of SentencePiece: one id per letter, a mark for a space, and bytes for all else."""
    letters = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    numbered = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(numbered, [], fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


KINDS = {"bytes": bytes_of_text, "letters": letters_of_text}


def save(folder: Path, kind: str, family: str, named: str | None = None, *, starts: bool = False, **config: Any) -> Path:
    """A model's folder without weights; `starts`: tokenizer.json puts <s> before a text."""
    folder.mkdir(exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([*MARKS, "<extra>"])
    if starts:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    set_config(folder, model_type=family, eos_token_id=2, vocab_size=512)
    set_config(folder, "tokenizer_config.json", tokenizer_class=named, **config)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_class_gives_the_ids_and_special_tokens_of_auto_tokenizer(kind: str, family: str, tmp_path: Path):
    lossy = set()
    for number, named in enumerate(CLASSES):
        folder = save(tmp_path / str(number), kind, family, named, bos_token="<s>", own_token="<added>")
        theirs = AutoTokenizer.from_pretrained(folder)
        ids = theirs(TEXT, add_special_tokens=False).input_ids
        if "PAR - BUR" not in theirs.decode(ids):
            lossy.add(named)
            with pytest.raises(InputError, match=r"loses letters when it is read as a .*'PreTrainedTokenizerFast'"):
                read_tokenizer(folder)
            continue
        found = read_tokenizer(folder)
        assert found.tokenizer.encode(TEXT, add_special_tokens=False).ids == ids, named
        assert found.special_tokens == theirs.special_tokens_map, named
    if family != "qwen2":
        assert not lossy & {"PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer"}, "the cure that the sentence names"


NAMED = [
    ("LlamaTokenizer", {}, {}),
    ("PreTrainedTokenizerFast", {"bos_token": "<s>"}, {}),
    ("PreTrainedTokenizerFast", {}, {"bos_token": "<s>"}),
    ("PreTrainedTokenizerFast", {}, {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False}}),
    ("LlamaTokenizer", {"bos_token": "<extra>"}, {"bos_token": "<s>"}),
    ("PreTrainedTokenizerFast", {}, {}),
]
"""Where a start token is named: by the class, in tokenizer_config.json, in special_tokens_map.json."""


@pytest.mark.parametrize(("named", "config", "special"), NAMED)
def test_the_start_token_of_a_template_is_the_one_of_transformers_wherever_it_is_named(named, config, special, tmp_path: Path):
    folder = save(tmp_path, "letters", "llama", named, **config)
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(LLAMA.replace("strftime_now is defined", "false"))
    board, theirs = Board.start(), AutoTokenizer.from_pretrained(folder)
    rules, body = parts(board, "FRANCE")
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": body}]
    asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = Tokens(Codec(folder), PromptSettings()).prompt_ids(board, board.legal_orders()["FRANCE"])
    assert Codec(folder).decode(ids[len(asked) :]) == ANSWER_CUE
    assert ids[: len(asked)] == asked and (asked[0] == 1) == (named == "LlamaTokenizer" or bool(config or special))


@pytest.mark.parametrize(
    ("named", "family", "starts", "config", "expected"),
    [
        ("PreTrainedTokenizerFast", "llama", True, {}, (1,)),
        ("PreTrainedTokenizerFast", "llama", False, {"bos_token": "<s>"}, ()),
        ("PreTrainedTokenizerFast", "llama", False, {"bos_token": "<s>", "add_bos_token": True}, (1,)),
        ("PreTrainedTokenizerFast", "llama", False, {"add_bos_token": True}, ()),
        ("LlamaTokenizer", "llama", False, {}, (1,)),
        ("LlamaTokenizerFast", "llama", False, {"add_bos_token": False}, ()),
        ("LlamaTokenizer", "llama", False, {"add_bos_token": True}, (1,)),
        ("LlamaTokenizer", "llama", True, {}, (1,)),
        (None, "gemma3_text", False, {"bos_token": "<s>"}, (1,)),
        ("GemmaTokenizer", "gemma3_text", False, {"bos_token": "<s>"}, (1,)),
        ("LlamaTokenizer", "mistral", False, {"bos_token": "<s>"}, (1,)),
        ("Qwen2Tokenizer", "qwen3", False, {"bos_token": "<s>"}, ()),
    ],
)
def test_a_plain_prompt_begins_with_the_start_token_that_file_class_or_flag_adds(
    named, family, starts, config, expected, tmp_path: Path
):
    folder = save(tmp_path, "bytes" if "Qwen" in str(named) else "letters", family, named, starts=starts, **config)
    board = Board.start()
    tokens = Tokens(Codec(folder))
    assert tokens.codec.start_ids == expected
    ids = tokens.prompt_ids(board, board.legal_orders()["FRANCE"])
    assert tuple(ids[: len(expected)]) == expected and 1 not in ids[len(expected) :]


def test_truncation_and_padding_left_in_the_file_change_no_prompt(tmp_path: Path):
    board, folder = Board.start(), save(tmp_path, "letters", "llama", "PreTrainedTokenizerFast")
    whole = Tokens(Codec(folder)).prompt_ids(board, board.legal_orders()["FRANCE"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for named in ("PreTrainedTokenizerFast", "LlamaTokenizer"):
        set_config(folder, "tokenizer_config.json", tokenizer_class=named, add_bos_token=False)
        for length in (5, 4096):
            tokenizer.enable_truncation(length)
            tokenizer.enable_padding(length=4096)
            tokenizer.save(str(folder / "tokenizer.json"))
            assert Tokens(Codec(folder)).prompt_ids(board, board.legal_orders()["FRANCE"]) == whole


def test_a_damaged_tokenizer_is_refused_in_one_sentence(tmp_path: Path):
    folder = save(tmp_path, "letters", "llama")
    (folder / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(InputError, match=r"the tokenizer of model '.*' cannot be read .*: copy or download it again"):
        Codec(folder)
