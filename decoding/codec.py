"""Text to token ids and back; each text is tokenised once.

Prompts are encoded segment by segment (rules, board, power), so prompts that share a segment share its ids. Orders are encoded
line by line and never as joined text, so each order text has exactly one token path. This module does not interpret orders.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from decoding.model_files import eos_token_id
from telemetry.errors import InputError

ORDER_SEPARATOR = "\n"


class Codec:
    """Encodes prompts and orders with one model's tokenizer. Ids are ints in that model's vocabulary."""

    def __init__(self, folder: Path) -> None:
        """Load `folder`/tokenizer.json.

        Raises:
            InputError: the line break is not a single token, so the ends of orders could not be recognised.
        """
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_id = eos_token_id(folder)
        separator = self._tokenizer.encode(ORDER_SEPARATOR, add_special_tokens=False).ids
        if len(separator) != 1:
            raise InputError(f"tokenizer of '{folder}' encodes the line break as {len(separator)} tokens; it must be one token")
        self.separator_id = int(separator[0])
        self.vocabulary_size = self._tokenizer.get_vocab_size()
        # Segments change with every position. There are about 13,000 order texts in all.
        self._encode_segment = lru_cache(maxsize=1024)(self._encode)
        self.encode_order = lru_cache(maxsize=32768)(self._encode_order)

    def encode_prompt(self, segments: Iterable[str]) -> list[int]:
        """Ids of a prompt from its segments, most shared first. Equal leading segments give equal leading ids."""
        ids: list[int] = []
        for segment in segments:
            ids.extend(self._encode_segment(segment))
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text. Special tokens that are written out in the text are recognised."""
        return self._encode(text)

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

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_order(self, text: str) -> tuple[int, ...]:
        ids = self._encode(text)
        if not ids or self.separator_id in ids or self.eos_id in ids:
            raise InputError(
                f"tokenizer encodes order '{text}' as nothing, or with a token that ends an order: use another tokenizer"
            )
        return ids
