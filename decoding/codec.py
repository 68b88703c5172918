"""Text to token ids and back.

Each piece of text is encoded once, but with the text before it in view, because many tokenizers spell a word differently at the
start of a text or after a space. Orders are encoded line by line, so each order text has exactly one token path. This module does
not interpret orders and does not know the parts of a prompt.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from decoding.model_files import eos_token_id
from game.prompts import ANSWER_CUE
from telemetry.errors import InputError

ORDER_SEPARATOR = "\n"
_ANY_ORDER = "A PAR H"


class Codec:
    """Encodes prompts and orders with one model's tokenizer. Ids are ints in that model's vocabulary."""

    folder: Path | None = None
    """Folder of the model; None if there is none."""
    start_ids: tuple[int, ...] = ()
    """Ids that the tokenizer itself puts before a text: the beginning-of-sequence token, or nothing."""

    def __init__(self, folder: Path) -> None:
        """Load `folder`/tokenizer.json.

        Raises:
            InputError: the line break after an order is not a token of its own, so the ends of orders could not be recognised.
        """
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with_special = self._tokenizer.encode(_ANY_ORDER)
        self.start_ids = tuple(with_special.ids[: with_special.special_tokens_mask.index(0)])
        self._prepare(eos_token_id(folder), self._tokenizer.get_vocab_size())

    def _prepare(self, eos_id: int, vocabulary_size: int) -> None:
        self.eos_id, self.vocabulary_size = eos_id, vocabulary_size
        self._cue = self.encode(ANSWER_CUE)
        separator = self.encode_after(ANSWER_CUE + _ANY_ORDER, ORDER_SEPARATOR)
        if separator is None or len(separator) != 1:
            raise InputError(
                f"tokenizer of '{self.folder}' does not encode the line break after an order as one token of its own: "
                "use a model with another tokenizer"
            )
        (self.separator_id,) = separator
        # There are about 13,000 order texts in all.
        self.encode_order = lru_cache(maxsize=32768)(self._encode_order)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without `start_ids`. Special tokens that are written out in the text are recognised."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_after(self, before: str, text: str) -> tuple[int, ...] | None:
        """Ids of `text` as the tokenizer spells it after `before`; None if it merges letters of the two into one token."""
        head, whole = self.encode(before), self.encode(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else None

    def single_token(self, text: str) -> int | None:
        """The id of `text` if it is a single token, else None."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, for display only."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _encode_order(self, text: str) -> tuple[int, ...]:
        # The order is spelled twice: after the cue and before a line break, and after a line break and at the end.
        ids, cue = self.encode(f"{ANSWER_CUE}{text}{ORDER_SEPARATOR}{text}"), self._cue
        order = ids[len(cue) : len(cue) + (len(ids) - len(cue) - 1) // 2]
        if ids != (*cue, *order, self.separator_id, *order):
            raise InputError(
                f"tokenizer of '{self.folder}' encodes order '{text}' differently at the ends of a line: "
                "use a model with another tokenizer"
            )
        if not order or self.separator_id in order or self.eos_id in order:
            raise InputError(
                f"tokenizer encodes order '{text}' as nothing, or with a token that ends an order: use another tokenizer"
            )
        return order
