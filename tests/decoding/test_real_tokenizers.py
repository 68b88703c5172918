"""The tokenizer of a real model, as `mistral_common` ships it: SentencePiece with 32,768 ids.

`mistral_common` is the independent oracle: it encodes with its own code.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import mistral_common
import pytest

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END
from entente.game.board import Board
from entente.game.legal import LegalOrders, OrderKind
from entente.game.prompts import PromptSettings, board_text, power_text, rules_text
from entente.game.scripted import player
from entente.players.policy import Tokens
from tests.chat_models import MISTRAL

DATA = Path(str(mistral_common.__file__)).parent / "data"
SENTENCEPIECE = DATA / "mistral_instruct_tokenizer_240323.model.v3"
Encode = Callable[[str], list[int]]


def positions(seed: int = 11) -> Iterator[tuple[Board, dict[str, LegalOrders], dict[str, list[str]]]]:
    """Boards with the legal orders and random orders of each power, until each kind of orders was seen."""
    rng, board, missing = random.Random(seed), Board.start(), set(OrderKind)
    while missing:
        legal = board.legal_orders()
        orders = {power: player("random")(own, rng, board) for power, own in legal.items()}
        if new := missing & {own.kind for own in legal.values()}:
            missing -= new
            yield board, legal, orders
        board.step(orders)


def config(folder: Path, eos: int) -> None:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos, "max_position_embeddings": 4096}))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Encode]:
    """A model's folder with this tokenizer, and the oracle."""
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from transformers import LlamaTokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    shutil.copy(SENTENCEPIECE, folder / "tokenizer.model")
    LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)
    oracle = SentencePieceTokenizer(str(SENTENCEPIECE))
    config(folder, oracle.eos_id)
    return folder, lambda text: oracle.encode(text, bos=False, eos=False)


def check(folder: Path, oracle: Encode, prompts: PromptSettings) -> None:
    """Prompts and answers are those of the oracle, and legal tables spell and read back any answer."""
    tokens = Tokens(Codec(folder), prompts)
    codec, tables, rng = tokens.codec, tokens.tables, random.Random(3)
    for board, legal, orders in positions():
        for power, own in legal.items():
            text = rules_text(prompts) + board_text(board, power, prompts) + power_text(own, board, prompts)
            ids = tokens.prompt_ids(board, own)
            assert ids == [*codec.start_ids, *oracle(text)]
            answer = "\n".join(orders[power])
            spelled = tables.spell(orders[power], own)
            assert ids + spelled[:-1] == [*codec.start_ids, *oracle(text + answer)] and spelled[-1] == codec.eos_id
            table, node, sampled = tables.table(own), 0, []
            table.legal_sets(spelled)
            while node != END:
                sampled.append(rng.choice(table.allowed(node).tolist()))
                node = table.advance(node, sampled[-1])
            read = tables.read(sampled, own)
            assert own.admits(read) and tables.spell(read, own) == sampled
            for options in own.options:
                codec_ids = {codec.encode_order(order) for order in options}
                assert len(codec_ids) == len(options)


def test_sentencepiece_spells_prompts_and_answers_as_in_the_whole_text(sentencepiece):
    assert Codec(sentencepiece[0]).start_ids == (1,), "a conversion by transformers 5 leaves it to the class"
    check(*sentencepiece, PromptSettings(legal_orders="lines"))


def test_every_order_of_several_positions_follows_a_line_break_in_one_spelling(sentencepiece):
    folder, oracle = sentencepiece
    codec, start = Codec(folder), len(oracle("ORDERS:\n"))
    for _, legal, _ in positions(seed=5):
        orders = {order for own in legal.values() for options in own.options for order in options}
        for order in orders:
            assert list(codec.encode_order(order)) == oracle(f"ORDERS:\n{order}")[start:]
            assert list(codec.encode_order(order)) != oracle(order), "a text of its own begins with a space"


def check_chat(folder: Path, file: Path, oracle: Encode) -> None:
    """Prompts in the template are the oracle's chats, then the cue."""
    from mistral_common.protocol.instruct.messages import SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokens, theirs = Tokens(Codec(folder), PromptSettings()), MistralTokenizer.from_file(str(file))
    cue = oracle("ORDERS:\n")
    for board, legal, orders in positions():
        for power, own in legal.items():
            body = (board_text(board, power) + power_text(own, board, cue="")).removesuffix("\n")
            messages = [SystemMessage(content=rules_text().removesuffix("\n")), UserMessage(content=body)]
            request = ChatCompletionRequest(messages=messages)
            assert tokens.prompt_ids(board, own) == [*theirs.encode_chat_completion(request).tokens, *cue]
            tokens.tables.table(own).legal_sets(tokens.tables.spell(orders[power], own))


def test_sentencepiece_within_a_chat_template_gives_the_ids_of_mistral_common(sentencepiece, tmp_path: Path):
    folder, oracle = sentencepiece
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(MISTRAL)
    check_chat(tmp_path / "chat", SENTENCEPIECE, oracle)
