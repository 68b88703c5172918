"""Text to token ids and back.

Text is encoded in the context of the text before it, because many tokenizers encode a word differently at the start of a text or
after a space. Orders are encoded line by line, so each order has exactly one token sequence.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from entente.decoding.model_files import end_token_ids, vocabulary_rows
from entente.decoding.read_tokenizer import read_tokenizer
from entente.game.prompts import ANSWER_CUE
from entente.telemetry.errors import InputError

ORDER_SEPARATOR = "\n"
_ANY_ORDER = "A PAR H"


class Codec:
    folder: Path | None = None
    start_ids: tuple[int, ...] = ()
    """Ids that the tokenizer adds before a text: the beginning-of-sequence token, or empty."""
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: Path) -> None:
        """Raises InputError if the tokenizer cannot be read, or the line break after an order is not a separate token."""
        self.folder = folder
        loaded = read_tokenizer(folder)
        self._tokenizer, self.special_tokens, self.start_ids = loaded.tokenizer, loaded.special_tokens, loaded.start_ids
        end_ids, rows = end_token_ids(folder), vocabulary_rows(folder)
        known = max(*self._tokenizer.get_vocab().values(), *end_ids) + 1
        self._prepare(end_ids, known if rows is None else min(known, rows))

    def _prepare(self, end_ids: tuple[int, ...], vocabulary_size: int) -> None:
        self.eos_id, self.end_ids, self.vocabulary_size = end_ids[0], tuple(sorted(end_ids)), vocabulary_size
        """The id that ends a completion; all ids that end the model's turn, ascending; bound of the ids that both tokenizer and
        model have."""
        self._cue = self.encode(ANSWER_CUE)
        separator = self.encode_after(ANSWER_CUE + _ANY_ORDER, ORDER_SEPARATOR)
        if separator is None or len(separator) != 1:
            raise InputError(
                f"tokenizer of '{self.folder}' does not encode the line break after an order as one token of its own: "
                "use a model with another tokenizer"
            )
        (self.separator_id,) = separator
        if self.separator_id in end_ids:
            raise InputError(
                f"model '{self.folder}' ends its turn with the line break after an order: take {self.separator_id} out of "
                "eos_token_id in its generation_config.json and config.json"
            )
        self._orders: dict[str, tuple[int, ...]] = {}
        """Cached ids by order text; there are about 13,000 orders in all."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without `start_ids`. Recognises special tokens in the text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_after(self, before: str, text: str) -> tuple[int, ...] | None:
        """Ids of `text` after `before`; None if the tokenizer merges letters of the two into one token."""
        head, whole = self.encode(before), self.encode(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else None

    def single_token(self, text: str) -> int | None:
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and ids[0] < self.vocabulary_size else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, for display only."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_order(self, text: str) -> tuple[int, ...]:
        """Ids of an order line, without its end. Raises as `encode_orders`."""
        ids = self._orders.get(text)
        if ids is None:
            self.encode_orders([text])
            ids = self._orders[text]
        return ids

    def encode_orders(self, texts: Iterable[str]) -> None:
        """Encode order lines for `encode_order` in one batch, as the lines of one answer; the first is encoded after the cue and
        after a line break. Raises InputError if an order's encoding depends on its place, is empty, or has an end token."""
        new = [text for text in dict.fromkeys(texts) if text not in self._orders]
        if not new:
            return
        lines = self._lines(self.encode(ANSWER_CUE + ORDER_SEPARATOR.join([*new, new[0]])))
        if len(lines) == len(new) + 1 and lines[0] == lines[-1] and all(line and not {*self.end_ids} & {*line} for line in lines):
            self._orders.update(zip(new, lines[:-1], strict=True))
        elif len(new) > 1:  # one by one, so that the message names the order
            for text in new:
                self.encode_orders([text])
        elif len(lines) == 2 and lines[0] == lines[1]:
            raise InputError(
                f"tokenizer encodes order '{new[0]}' as nothing, or with a token that ends an order: use another tokenizer"
            )
        else:
            raise InputError(
                f"tokenizer of '{self.folder}' encodes order '{new[0]}' differently at the ends of a line: "
                "use a model with another tokenizer"
            )

    def _lines(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Lines of an answer after the cue, without end marks; empty if the cue is encoded differently than alone."""
        if ids[: len(self._cue)] != self._cue:
            return []
        lines, begin = [], len(self._cue)
        while True:
            try:
                end = ids.index(self.separator_id, begin)
            except ValueError:
                return [*lines, ids[begin:]]
            lines.append(ids[begin:end])
            begin = end + 1
