"""Prompts within a chat template: the pieces are those of the whole, and a template that cannot hold a prompt is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from entente.decoding import chat_format as module
from entente.decoding.base_identity import base_identity
from entente.decoding.codec import Codec
from entente.decoding.prompt_form import PromptForm, sample_prompts
from entente.game.board import Board
from entente.game.prompts import ANSWER_CUE, PromptSettings, board_text, power_text, rules_text, worked_examples
from entente.players.policy import Tokens
from entente.telemetry.errors import InputError
from tests.chat_models import (
    GEMMA,
    LLAMA,
    MARKS,
    NO_GENERATION_PROMPT,
    NO_SYSTEM,
    QWEN,
    R1,
    TEMPLATES,
    chat_model,
    set_config,
)

SETTINGS = PromptSettings()


@pytest.fixture
def chat(model: Path, tmp_path: Path) -> Callable[..., Tokens]:
    """Tokens of the small model with a chat template: `chat(template)`."""

    def make(template: str, **prompts: str | int) -> Tokens:
        folder = chat_model(model, tmp_path / "chat", template)
        return Tokens(Codec(folder), PromptSettings.model_validate(prompts))

    return make


ROLES = ("user", "assistant")


def parts(board: Board, power: str) -> tuple[str, str]:
    """Rules, and board with power, as the messages of a chat hold them."""
    body = board_text(board, power) + power_text(board.legal_orders()[power], board, cue="")
    return rules_text().removesuffix("\n"), body.removesuffix("\n")


@pytest.mark.in_turn
@pytest.mark.parametrize("thinks", [False, True], ids=["", "thinks"])
@pytest.mark.parametrize("examples", [0, 3])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_transformers_renders_and_encodes_then_the_cue(chat, name: str, examples: int, thinks: bool):
    tokens = chat(TEMPLATES[name], examples=examples, thinking_tokens=8 if thinks else 0)
    board = Board.start()
    theirs = AutoTokenizer.from_pretrained(tokens.codec.folder)
    for power in ("FRANCE", "TURKEY"):
        _, body = parts(board, power)
        rules = rules_text(tokens.prompts).removesuffix("\n")
        turns = [(role, said) for pair in worked_examples(tokens.prompts) for role, said in zip(ROLES, pair, strict=True)]
        said = [*turns, ("user", body)]
        said = [("system", rules), *said] if name != "gemma" else [("user", f"{rules}\n{said[0][1]}"), *said[1:]]
        messages = [{"role": role, "content": content} for role, content in said]
        text = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinks, strftime_now=module._DAY.strftime
        )
        assert isinstance(text, str)
        text += " " if name == "mistral" else ""  # which the template writes before an answer
        text += "\n</think>\n\n" if name == "r1" and not thinks else ""
        text += ANSWER_CUE if not thinks else "" if text.endswith("<think>\n") else "<think>\n"
        whole = theirs(text, add_special_tokens=False).input_ids
        assert tokens.prompt_ids(board, board.legal_orders()[power]) == whole


def test_powers_of_a_position_share_all_but_their_own_piece(chat):
    tokens, board = chat(QWEN, own_line="in_place", legal_orders="lines"), Board.start()
    form, prompts, legal = tokens.form, tokens.prompts, board.legal_orders()
    france, turkey = (
        form.pieces(board_text(board, power, prompts), power_text(legal[power], board, prompts, cue=""))
        for power in ("FRANCE", "TURKEY")
    )
    assert france[:2] == turkey[:2] and france[2] != turkey[2]
    board.step({})
    later = form.pieces(board_text(board, "FRANCE", prompts), power_text(board.legal_orders()["FRANCE"], board, prompts, cue=""))
    assert later[0] == france[0] and later[1] != france[1]
    assert form._codec.decode(france[0]).endswith(rules_text(prompts).removesuffix("\n") + form.chat.between)


def test_the_beginning_of_the_sequence_comes_once_from_the_template_or_the_tokenizer(chat, model: Path):
    tokens, board = chat(LLAMA), Board.start()
    folder = tokens.codec.folder
    begin = tokens.codec.encode("<|begin|>")
    assert tokens.prompt_ids(board, board.legal_orders()["FRANCE"]).count(*begin) == 1

    # A tokenizer that adds the mark itself, as Llama's does: with the template the mark must not come twice.
    file = folder / "tokenizer.json"
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", *begin), ("<|end|>", 0)]
    )
    tokenizer.save(str(file))
    for chat_setting in ("auto", "none"):
        both = Tokens(Codec(folder), PromptSettings(chat=chat_setting))
        ids = both.prompt_ids(board, board.legal_orders()["FRANCE"])
        assert ids.count(*begin) == 1 and ids[0] == begin[0] and ids[-1] != tokens.codec.eos_id, chat_setting
    plain = Tokens(Codec(model))
    assert plain.codec.start_ids == ()


def test_without_a_template_or_with_none_a_prompt_is_plain_text(chat, tokens: Tokens):
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    text = rules_text() + board_text(board, "FRANCE") + power_text(legal, board)
    assert tokens.codec.decode(tokens.prompt_ids(board, legal)) == text
    for sample in sample_prompts(SETTINGS):
        parts_apart = (rules_text(), sample.board, sample.power + ANSWER_CUE)
        assert tokens.form.ids(sample.board, sample.power) == [id for part in parts_apart for id in tokens.codec.encode(part)]
    unused = chat(QWEN, chat="none")
    assert unused.prompt_ids(board, legal) == tokens.prompt_ids(board, legal)
    assert unused.form.chat == module.PLAIN == tokens.form.chat


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_all_prompts_share_the_worked_examples(chat, setting: str):
    tokens, board = chat(QWEN, chat=setting, examples=6), Board.start()
    first = {tokens.form.pieces(*prompt)[0] for prompt in [("SPRING\n", "X"), (board_text(board, "ITALY"), "ITALY MOVEMENT")]}
    assert len(first) == 1
    text = tokens.codec.decode(first.pop())
    assert [text.count(answer) for _, answer in worked_examples(tokens.prompts)] == [1] * 6
    kinds = [asked.split(" | ")[1].split(" ") for asked, _ in worked_examples(tokens.prompts)]
    assert all(any(kind in words for words in kinds) for kind in ("MOVEMENT", "RETREAT", "BUILD", "DISBAND"))


def test_a_cue_that_opens_a_thought_lets_the_template_think(chat):
    codec = chat(QWEN).codec
    assert PromptForm(codec, SETTINGS).text("", "").endswith("assistant\n<think>\n\n</think>\n\nORDERS:\n")
    assert PromptForm(codec, SETTINGS, cue="<think>\n").text("", "").endswith("assistant\n<think>\n")


@pytest.mark.parametrize("opened", ["<think>", "<think>\n", "[THINK]", "[THINK]\n"])
@pytest.mark.parametrize("cue", [ANSWER_CUE, "THOUGHT:\n", "<think>\n", "[THINK]\n"])
def test_a_thought_that_a_template_opens_is_opened_once_or_closed(chat, opened: str, cue: str):
    codec = chat(QWEN).codec
    template = R1.replace("<think>\\n", opened.replace("\n", "\\n"))
    (codec.folder / "chat_template.jinja").write_text(template)
    mark = opened.strip()
    closed = opened + opened.removeprefix(mark) + mark.replace("<", "</").replace("[", "[/") + "\n\n" + cue
    assert PromptForm(codec, SETTINGS, cue).text("", "").endswith(opened if cue.startswith(mark) else closed)


def test_a_prompt_with_ids_that_the_model_lacks_is_refused(chat):
    folder = chat(QWEN).codec.folder
    set_config(folder, vocab_size=Codec(folder).vocabulary_size - len(MARKS) + 2)
    with pytest.raises(InputError, match=r"spells a prompt with token .*vocab_size.: give the model its own tokenizer"):
        PromptForm(Codec(folder), SETTINGS)
    PromptForm(Codec(folder), PromptSettings(chat="none"))


def test_where_a_tokenizer_merges_across_the_seam_the_seam_moves_and_says_what_it_costs(chat):
    """The space before the board becomes part of the board's first token."""
    spaced = QWEN.replace("m.role + '\\n'", "m.role + ' '").replace("'<|im_end|>\\n'", "'<|im_end|>'")
    tokens = chat(spaced)
    form, board = tokens.form, Board.start()
    assert form.after_rules.moved == 1
    assert form.after_board.moved == 0
    power = power_text(board.legal_orders()["FRANCE"], board, cue="")
    _, shared, _ = form.pieces(board_text(board, "FRANCE"), power)
    assert tokens.codec.decode(shared).startswith(" SPRING")
    assert tuple(form.ids(board_text(board, "FRANCE"), power)) == tokens.codec.encode(
        form.text(board_text(board, "FRANCE"), power)
    )


class Letters(Codec):
    """One id per letter, except where `pattern` finds more than one letter."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._prepare(end_ids=(-1,), vocabulary_size=2**31)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(sum(map(ord, found)) for found in re.findall(f"{self._pattern}|.", text, re.DOTALL))


def test_a_power_whose_name_merges_with_the_end_of_the_board_moves_that_seam():
    codec = Letters(r"\n[A-Z](?=[^\n]+ (?:MOVEMENT|RETREAT|BUILD|DISBAND) )")
    form = PromptForm(codec, SETTINGS)
    assert (form.after_rules.moved, form.after_board.moved) == (0, 1)
    for sample in sample_prompts(SETTINGS):
        _, shared, rest = form.pieces(sample.board, sample.power)
        assert rest[0] >= ord("\n") + ord("A") and shared[-1] != ord("\n")
        assert tuple(form.ids(sample.board, sample.power)) == codec.encode(form.text(sample.board, sample.power))


def test_a_piece_is_encoded_with_the_letter_before_it_if_it_is_spelled_differently_at_the_start_of_a_text():
    codec = Letters(r"\A.")
    codec.encode = lambda text: (1, *map(ord, text)) if text else ()  # a mark that every text begins with
    codec._prepare(end_ids=(-1,), vocabulary_size=2**31)
    form = PromptForm(codec, SETTINGS)
    assert (form.after_rules.context, form.after_board.context) == (1, 1)
    sample = sample_prompts(SETTINGS)[0]
    assert form.ids(sample.board, sample.power).count(1) == 1
    assert codec.encode_order("A PAR H") == tuple(map(ord, "A PAR H"))


def test_a_piece_after_a_mark_of_several_letters_is_encoded_with_the_whole_mark_in_view():
    """The last letter of the mark alone would merge with the board's first."""
    codec = Letters(r"named\.\n|\n(?=SPRING|FALL|WINTER)[A-Z]")
    form = PromptForm(codec, SETTINGS)
    assert (form.after_rules.moved, form.after_rules.context, form.after_board.context) == (0, None, 1)
    for sample in sample_prompts(SETTINGS):
        assert tuple(form.ids(sample.board, sample.power)) == codec.encode(form.text(sample.board, sample.power))


def test_a_tokenizer_that_spells_a_prompt_only_as_a_whole_is_refused():
    with pytest.raises(InputError, match="encodes a prompt only as a whole"):
        PromptForm(Letters(r"(?s:.+)ORDERS:"), SETTINGS)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (NO_SYSTEM, "drops or changes the system part, which holds the rules"),
        (NO_GENERATION_PROMPT, "writes no generation prompt, the head of the model's turn"),
        (QWEN.replace("m.content", "(m.content | replace('WAR', 'war'))"), "drops or changes the user's part"),
        (QWEN.replace("m.content", "m.content + (m.content | length | string)"), "changes the text of a message"),
        ("{{ raise_exception('not today') }}", r"cannot be used \(not today\)"),
        ("{% if %}", "cannot be used"),
    ],
    ids=["drops the system part", "no generation prompt", "board", "length", "raises", "syntax"],
)
def test_a_template_that_cannot_hold_a_prompt_is_refused_with_a_cure(chat, template: str, sentence: str):
    with pytest.raises(
        InputError, match=f"the chat template of model '.*' {sentence}.*: correct the template, or set prompts.chat"
    ):
        chat(template)


def test_a_template_in_the_tokenizers_config_counts_and_named_ones_need_a_default(chat):
    folder, file = chat(QWEN).codec.folder, "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink()
    for found in (GEMMA, [{"name": "tools", "template": "-"}, {"name": "default", "template": GEMMA}]):
        set_config(folder, file, chat_template=found, bos_token={"__type": "AddedToken", "content": "<|begin|>"})
        assert PromptForm(Codec(folder), SETTINGS).text("", "").startswith("<|begin|><start_of_turn>user\nDiplomacy")
    set_config(folder, file, chat_template=[{"name": "tools", "template": "-"}])
    with pytest.raises(InputError, match="has the chat templates tools, but none named 'default'"):
        PromptForm(Codec(folder), SETTINGS)


def test_a_chat_template_is_part_of_what_makes_two_models_the_same(chat, model: Path):
    folder = chat(QWEN).codec.folder
    before = base_identity(folder)
    (folder / "chat_template.jinja").write_text(GEMMA)
    assert base_identity(folder) != before
