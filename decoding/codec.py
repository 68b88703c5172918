"""Text to token ids and back, each text once.

Owns the tokenizer. Prompts are encoded segment by segment (rules, board, power), so that a segment shared by powers and
forks is encoded once and every prompt that shares it shares its ids. Orders are encoded alone, line by line, never as joined
text: one order text has one token path. Nothing here knows what an order means.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from decoding.model_files import eos_token_id
from telemetry.errors import InputError

ORDER_SEPARATOR = "\n"


class Codec:
    """Encodes prompts and orders with one model's tokenizer; ids are plain ints of that vocabulary."""

    def __init__(self, folder: Path) -> None:
        """Load `folder`/tokenizer.json.

        Raises:
            InputError: the line break is not a single token of its own, so orders could not be told apart.
        """
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_id = eos_token_id(folder)
        separator = self._tokenizer.encode(ORDER_SEPARATOR, add_special_tokens=False).ids
        if len(separator) != 1:
            raise InputError(f"tokenizer of '{folder}' spells the line break with {len(separator)} tokens; it must be one token")
        self.separator_id = int(separator[0])
        self.vocabulary_size = self._tokenizer.get_vocab_size()
        # Bounded: segments change with every position, orders come from a closed vocabulary of about 13,000 strings.
        self._encode_segment = lru_cache(maxsize=1024)(self._encode)
        self.encode_order = lru_cache(maxsize=32768)(self._encode_order)

    def encode_prompt(self, segments: Iterable[str]) -> list[int]:
        """Ids of a prompt given as its segments, most shared first; equal leading segments give equal leading ids."""
        ids: list[int] = []
        for segment in segments:
            ids.extend(self._encode_segment(segment))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, for people to read; never fed back to a model."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_order(self, text: str) -> tuple[int, ...]:
        ids = self._encode(text)
        if not ids or self.separator_id in ids or self.eos_id in ids:
            raise InputError(f"order '{text}' cannot be spelled by this tokenizer without its own end marks")
        return ids
