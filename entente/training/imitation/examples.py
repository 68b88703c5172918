"""A teacher's decisions as tokens, in batches for the micro-batch planner.

An example is the policy's prompt and the teacher's orders. Decisions with one legal order set are left out: a policy never gets
them. A batch is packed like the rows of a GRPO step, with a legal set of two ids marking the tokens to predict.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.prompt_form import PromptForm
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of
from entente.game.board import Board
from entente.game.prompts import ANSWER_CUE, PromptSettings, board_text, power_text
from entente.telemetry.errors import DataError
from entente.training.small_model import fitting_thought, wanted_centres
from storage.gather import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    ids: np.ndarray
    """int32 [prompt + completion]."""
    prompt: int
    phase: str
    """Short phase name, e.g. S1903M."""
    orders: int
    """Tokens of the orders, at the end; a thought may precede them."""
    legal_ids: np.ndarray
    """int32 [legal_offsets[-1]]: concatenated over the order positions; empty without `legal_sets`."""
    legal_offsets: np.ndarray
    """int32 [orders + 1]."""


class Examples:
    def __init__(self, codec: Codec, prompts: PromptSettings) -> None:
        """Checks the prompt form on real prompts."""
        self._codec, self._prompts = codec, prompts
        self._thinking = thinking_of(codec, prompts.thinking_tokens)
        self._form = PromptForm(codec, prompts, ANSWER_CUE if self._thinking is None else self._thinking.cue)
        self._tables = TableBuilder(codec, memo=1)

    def of(self, board: Board, orders: Mapping[str, Sequence[str]], *, legal_sets: bool = False) -> Iterator[Example]:
        """Raises DataError if an order set is not legal."""
        legal = board.legal_orders()
        shared = board_text(board, "", self._prompts) if self._prompts.own_line == "in_place" else None
        for power, own in orders.items():
            if power not in legal or not legal[power].admits(own):
                raise DataError(f"a teacher's game has illegal orders of {power} in {board.phase}: {', '.join(own)}; remove it")
            if legal[power].is_forced:
                continue
            prompt = self._form.ids(
                shared or board_text(board, power, self._prompts), power_text(legal[power], board, self._prompts, cue="")
            )
            spelled = self._tables.spell(own, legal[power])
            completion = spelled
            if self._thinking is not None:
                words = fitting_thought(wanted_centres(board, power, own), self._codec, self._thinking)
                completion = self._thinking.enclose(words, spelled)
            empty = np.zeros(0, np.int32), np.zeros(1, np.int32)
            sets = self._tables.table(legal[power]).legal_sets(spelled) if legal_sets else empty
            yield Example(
                ids=np.array([*prompt, *completion], np.int32),
                prompt=len(prompt),
                phase=board.phase,
                orders=len(spelled),
                legal_ids=sets[0],
                legal_offsets=sets[1],
            )


def predicts_all(examples: Sequence[Example]) -> Batch:
    """Predicts every token but each example's first."""
    ids = np.concatenate([example.ids for example in examples])
    starts = np.cumsum([0, *(len(example.ids) for example in examples)])
    targets = np.delete(ids, starts[:-1])
    return _batch(ids, starts, np.ones(len(examples), np.int32), np.repeat(targets, 2), 2 * np.arange(len(targets) + 1))


def predicts_orders(examples: Sequence[Example]) -> tuple[Batch, np.ndarray]:
    """Predicts order tokens among their legal ids; and bool [order tokens]: forced, whose set is their id twice."""
    ids = np.concatenate([example.ids for example in examples])
    starts = np.cumsum([0, *(len(example.ids) for example in examples)])
    prompts = np.array([len(example.ids) - example.orders for example in examples], np.int32)
    sizes = np.concatenate([np.diff(example.legal_offsets) for example in examples])
    repeats = np.where(sizes == 1, 2, sizes)
    ids_of_sets = np.concatenate([example.legal_ids for example in examples])
    legal = np.repeat(ids_of_sets, np.repeat(repeats // sizes, sizes))
    return _batch(ids, starts, prompts, legal, np.concatenate([[0], np.cumsum(repeats)])), sizes == 1


def _batch(ids: np.ndarray, starts: np.ndarray, prompts: np.ndarray, legal_ids: np.ndarray, legal_offsets: np.ndarray) -> Batch:
    """Policy-only fields are zero."""
    rows, completions = len(prompts), np.concatenate([[0], np.cumsum(np.diff(starts) - prompts)])
    nothing = np.zeros(rows, np.int32)
    return Batch(
        decision_ids=np.arange(rows),
        input_ids=ids,
        input_offsets=starts.astype(np.int64),
        prompt_lens=prompts,
        behaviour_logprobs=np.zeros(int(completions[-1]), np.float32),
        completion_offsets=completions.astype(np.int64),
        legal_ids=legal_ids.astype(np.int32),
        legal_offsets=legal_offsets.astype(np.int64),
        temperatures=np.ones(rows, np.float32),
        returns=np.zeros(rows),
        advantage_groups=nothing,
        policy_versions=nothing,
    )
