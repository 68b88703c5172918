"""Prompts of one model as token ids: rules, board and power, within the model's chat format, and the cue.

A prompt has three pieces, from most to least shared: common to all prompts, common to the powers or forks of a position, and the
rest. Each piece is encoded once, and the concatenated ids equal those of the whole text. Where a tokenizer merges letters across
a boundary, the boundary moves back to the nearest place where this holds (`Seam`). The constructor checks this on sample prompts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from entente.decoding.chat_format import ChatFormat, chat_format
from entente.decoding.codec import ORDER_SEPARATOR, Codec
from entente.decoding.thinking import turn_head
from entente.game.board import Board
from entente.game.legal import OrderKind
from entente.game.prompts import ANSWER_CUE, PromptSettings, board_text, power_text, rules_text, worked_examples
from entente.game.scripted import player
from entente.telemetry.errors import InputError

_SAMPLES_OF_A_KIND = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSample:
    board: str
    power: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    moved: int
    """Characters from the ideal boundary back to the seam."""
    context: int | None
    """Characters before the seam that are needed to encode the next piece: 1, or None for the whole prompt before it."""


class PromptForm:
    def __init__(self, codec: Codec, settings: PromptSettings, cue: str = ANSWER_CUE) -> None:
        """Raises InputError if the chat template cannot be used, or the tokenizer cannot encode prompts or orders."""
        self._codec, self._rules = codec, _stripped(rules_text(settings))
        samples = sample_prompts(settings)
        texts = [(self._rules, each.board + _stripped(each.power)) for each in samples]
        self.chat: ChatFormat = chat_format(
            codec.folder,
            settings.chat,
            texts,
            worked_examples(settings),
            special_tokens=codec.special_tokens,
            thinks=cue != ANSWER_CUE,
        )
        self._head = self.chat.before + self._rules + self.chat.between
        self._tail = turn_head(self.chat.after, cue)
        after_rules = [(self._head, each.board + self._rest(each.power)) for each in samples]
        self.after_rules = _find_seam(codec, after_rules, len(self._head))
        self._first_text, self._second_begin = _cut(self._head, self.after_rules.moved)
        after_board = [(self._head + each.board, self._rest(each.power)) for each in samples]
        shortest = min(len(self._second_begin + each.board) for each in samples)
        self.after_board = _find_seam(codec, after_board, shortest)
        # A template itself writes the beginning-of-sequence token, if its model wants one.
        self._start_ids = codec.start_ids if self.chat.is_plain else ()
        self._first = self._start_ids + codec.encode(self._first_text)
        # Boards and powers change with every position.
        self._encode_after = lru_cache(maxsize=1024)(codec.encode_after)
        self._check(samples)

    def pieces(self, board: str, power: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ids of the pieces of a prompt: common to all, common to a position, the rest. `board` and `power` are `board_text`, and
        `power_text` without cue. Raises InputError if the tokenizer merges letters across a seam, but in no sample."""
        shared, third = _cut(self._second_begin + board, self.after_board.moved)
        before = self._first_text
        second = self._encode_after(_last(before, self.after_rules.context), shared)
        rest = self._encode_after(_last(before + shared, self.after_board.context), third + self._rest(power))
        if second is None or rest is None:
            raise InputError(
                f"tokenizer of '{self._codec.folder}' merges letters of two parts of a prompt into one token, in the prompt of "
                f"'{power.partition(ORDER_SEPARATOR)[0]}': use a model with another tokenizer"
            )
        return self._first, second, rest

    def ids(self, board: str, power: str) -> list[int]:
        return [token for piece in self.pieces(board, power) for token in piece]

    def text(self, board: str, power: str) -> str:
        """The prompt as one text, without `Codec.start_ids`."""
        return self._head + board + self._rest(power)

    def _check(self, samples: Sequence[PromptSample]) -> None:
        """Raise InputError if separately encoded pieces or orders differ from the whole text, or an id is out of range."""
        codec = self._codec
        for sample in samples:
            ids, text = self.ids(sample.board, sample.power), self.text(sample.board, sample.power)
            answer = [token for line in sample.lines for token in (*codec.encode_order(line), codec.separator_id)][:-1]
            if (largest := max(ids + answer)) >= codec.vocabulary_size:
                raise InputError(
                    f"the tokenizer of model '{codec.folder}' spells a prompt with token {largest}, {codec.decode([largest])!r}, "
                    f"but its config.json has only {codec.vocabulary_size} (vocab_size): give the model its own tokenizer"
                )
            whole = text + ORDER_SEPARATOR.join(sample.lines)
            for what, apart, together in (("a prompt", ids, text), ("an answer", ids + answer, whole)):
                if tuple(apart) != self._start_ids + codec.encode(together):
                    raise InputError(
                        f"tokenizer of '{codec.folder}' does not encode the pieces of {what} as it encodes them together: "
                        "use a model with another tokenizer"
                    )

    def _rest(self, power: str) -> str:
        return _stripped(power) + self._tail


@lru_cache(maxsize=8)
def sample_prompts(settings: PromptSettings) -> tuple[PromptSample, ...]:
    """Prompts and answers of some positions of each kind, from one game between random players."""
    rng, board, seen = random.Random("prompt samples"), Board.start(), dict.fromkeys(OrderKind, 0)
    samples: list[PromptSample] = []
    while min(seen.values()) < _SAMPLES_OF_A_KIND and not board.is_over:
        legal = board.legal_orders()
        orders = {power: player("random")(own, rng, board) for power, own in legal.items()}
        for kind in sorted({own.kind for own in legal.values() if seen[own.kind] < _SAMPLES_OF_A_KIND}):
            seen[kind] += 1
            samples += [
                PromptSample(
                    board=board_text(board, power, settings),
                    power=power_text(own, board, settings, cue=""),
                    lines=tuple(orders[power]),
                )
                for power, own in legal.items()
                if own.kind is kind
            ]
        board.step(orders)
    return tuple(samples)


def _find_seam(codec: Codec, cuts: Sequence[tuple[str, str]], farthest: int) -> Seam:
    """The last seam at or before the ideal boundary that holds in all `cuts` (text before and after it, per sample), with the
    shortest sufficient context; moves back at most `farthest` characters."""
    wholes = [codec.encode(before + after) for before, after in cuts]
    for moved in range(farthest + 1):
        moved_cuts = [(first, begin + after) for before, after in cuts for first, begin in [_cut(before, moved)]]
        for context in (1, None):
            if all(_apart(codec, first, rest, context) == whole for (first, rest), whole in zip(moved_cuts, wholes, strict=True)):
                return Seam(moved=moved, context=context)
    raise InputError(
        f"tokenizer of '{codec.folder}' encodes a prompt only as a whole, so the powers of a position cannot share a prefix: "
        "use a model with another tokenizer"
    )


def _apart(codec: Codec, first: str, rest: str, context: int | None) -> tuple[int, ...] | None:
    after = codec.encode_after(_last(first, context), rest)
    return None if after is None else codec.encode(first) + after


def _stripped(text: str) -> str:
    return text.removesuffix("\n")


def _cut(text: str, moved: int) -> tuple[str, str]:
    return text[: len(text) - moved], text[len(text) - moved :]


def _last(text: str, characters: int | None) -> str:
    return text if characters is None else text[len(text) - characters :]
