"""Makes the tiny model: no download, about a minute of CPU.

It has a byte-level BPE tokenizer trained on prompts and orders, and is a Qwen3 of about a million parameters that is first
trained to imitate a scripted player. On a base with random weights, LoRA reaches only half the gain. The result is a
`save_pretrained` folder, cached by the hash of its recipe.

A base that thinks before it orders imitates thoughts too: the names of the centres that the teacher's orders go for. They fit a
small budget, a tiny model can read them off the board, and they are a plan that training can tie the orders to.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from decoding.model_files import RECIPE, make_whole
from decoding.thinking import Thinking, thinking_of
from game.board import POWERS, Board
from game.notation import answer_lines
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import ANSWER_CUE, THOUGHT_CUE, board_text, power_text, rules_text
from training.recipe import find_tiny, longest_sequence, recipe_hash
from training.settings import TINY_TEACHER, TINY_VOCABULARY, TinyModelSettings
from training.small_model import fitting_thought, new_model, save_tokenizer, wanted_centres

_LAST_YEAR = 1907
_IMITATION_RATE = 3e-3
"""AdamW learning rate of imitation, with a short warm-up and a linear decay."""
_DECISIONS_A_ROW = 3
"""Decisions at most of a row of imitation, if each has a board of its own."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, steps done and total steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """One position of a teacher's game, with the teacher's orders for its powers, or for some of them."""

    shared: tuple[str, ...]
    """The prompt prefix of all powers: the rules, and the board if it is the same for all."""
    decisions: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    """Per power: the rest of its prompt, the words of its thought, and the lines of the teacher's orders."""


def make_tiny_model(
    root: Path, settings: TinyModelSettings, on_progress: OnProgress | None = None, prompts: PromptSettings = DEFAULT_PROMPTS
) -> Path:
    """Make the tiny model under `root`, unless it exists already.

    Returns:
        `root`/tiny-<recipe hash>, in the layout of `save_pretrained`.
    """
    report = on_progress or (lambda stage, done, total: None)
    final = root / f"tiny-{recipe_hash(settings, prompts)}"
    if find_tiny(root, settings, prompts) is None:
        make_whole(final, RECIPE, lambda folder: _make(folder, settings, prompts, report))
    return final


def _make(folder: Path, settings: TinyModelSettings, prompts: PromptSettings, report: OnProgress) -> None:
    positions = []
    for number in range(settings.source_games):
        positions.extend(_teacher_game(settings, prompts, number))
        report("scripted games", number + 1, settings.source_games)
    save_tokenizer(_texts(positions, "\n" + ANSWER_CUE if prompts.thinking_tokens else ""), TINY_VOCABULARY, folder)
    longest = longest_sequence(prompts)
    model = new_model(folder, hidden=settings.hidden, layers=settings.layers, longest=longest, seed=0)
    model.config.save_pretrained(folder)
    codec = Codec(folder)
    losses = _imitate(model, positions, settings, codec, thinking_of(codec, prompts.thinking_tokens), report)
    disable_progress_bar()  # `report` shows the progress
    model.save_pretrained(folder)
    recipe = {
        "settings": settings.model_dump(),
        "prompts": prompts.model_dump(),
        "parameters": model.num_parameters(),
        "loss": losses,
    }
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=1))


def _teacher_game(settings: TinyModelSettings, prompts: PromptSettings, number: int) -> Iterator[_Position]:
    """Positions of one game in which the teacher plays every power; forced order sets are left out."""
    teacher = player(TINY_TEACHER)
    rng, cue = random.Random(f"imitation-{number}"), THOUGHT_CUE if prompts.thinking_tokens else ANSWER_CUE
    board = Board.start()
    in_place = prompts.own_line == "in_place"
    most = len(POWERS) if in_place else _DECISIONS_A_ROW
    while not board.is_over and board.year <= _LAST_YEAR:
        legal = board.legal_orders()
        orders = {power: teacher(choice, rng, board) for power, choice in legal.items()}
        open_choices = [power for power, choice in legal.items() if not choice.is_forced]
        # A board of its own makes a decision three to four times as long, so a row then holds fewer of them.
        for first in range(0, len(open_choices), most):
            yield _Position(
                shared=(rules_text(prompts), *([board_text(board, "", prompts)] if in_place else [])),
                decisions=tuple(
                    (
                        ("" if in_place else board_text(board, power, prompts)) + power_text(legal[power], board, prompts, cue),
                        wanted_centres(board, power, orders[power]) if prompts.thinking_tokens else (),
                        tuple(answer_lines(orders[power], legal[power], prompts.order_notation)),
                    )
                    for power in open_choices[first : first + most]
                ),
            )
        board.step(orders)


def _texts(positions: list[_Position], after_thought: str) -> Iterator[str]:
    """The text of each position with its answers, for the tokenizer."""
    for position in positions:
        answers = (rest + " ".join(words) + after_thought + "\n".join(lines) for rest, words, lines in position.decisions)
        yield "".join(position.shared) + "".join(answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """Token ids of the shared prompt prefix (the head), and of each decision's tail: rest of the prompt, and completion."""

    head: list[int]
    tails: list[tuple[list[int], list[int]]]


def _imitate(
    model: Qwen3ForCausalLM,
    positions: list[_Position],
    settings: TinyModelSettings,
    codec: Codec,
    thinking: Thinking | None,
    report: OnProgress,
) -> list[float]:
    """Train the model on prompts and orders; returns the loss, nats per token, every 20 steps.

    The loss is over the whole vocabulary, so that legal tokens get probability mass, and over prompts too: the list of a power's
    own units repeats part of the board if its own line is in place, so the model learns to read the board.
    """
    spell_lines = TableBuilder(codec).spell_lines

    def spell(words: tuple[str, ...], lines: tuple[str, ...]) -> list[int]:
        orders = spell_lines(lines)
        return orders if thinking is None else thinking.enclose(fitting_thought(words, codec, thinking), orders)

    rows = [
        SharedRow(
            head=[token for text in position.shared for token in codec.encode(text)],
            tails=[(list(codec.encode(rest)), spell(words, lines)) for rest, words, lines in position.decisions],
        )
        for position in positions
    ]
    order = np.random.default_rng(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_IMITATION_RATE, weight_decay=0.01)
    warm, total = max(1, settings.imitation_steps // 20), settings.imitation_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, max(0.05, 1 - (step - warm) / max(1, total - warm)))
    )
    losses = []
    for step in range(total):
        loss = language_loss(model, [rows[index] for index in order.integers(0, len(rows), settings.imitation_positions)])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0 or step == total - 1:
            losses.append(round(float(loss.detach()), 4))
        report("imitation", step + 1, total)
    return losses


def language_loss(model: Qwen3ForCausalLM, rows: list[SharedRow]) -> torch.Tensor:
    """Mean cross-entropy over the tokens of heads and tails, nats; each head is computed once.

    A tail sees its head and itself, but no other tail, and its positions continue those of the head. So the result equals that of
    separate prompts, except that each head counts once.
    """
    shape = len(rows), max(len(row.head) + sum(len(rest) + len(completion) for rest, completion in row.tails) for row in rows)
    ids, places = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)  # padding sees only padding, so that no softmax is empty
    row_index, at, target = [], [], []
    for index, row in enumerate(rows):
        head = end = len(row.head)
        ids[index, :head], places[index, :head], segments[index, :head] = torch.tensor(row.head), torch.arange(head), 0
        at.extend(range(head - 1))
        target.extend(row.head[1:])
        for number, (rest, completion) in enumerate(row.tails, start=1):
            tail = rest + completion
            start, end = end, end + len(tail)
            ids[index, start:end], segments[index, start:end] = torch.tensor(tail), number
            places[index, start:end] = torch.arange(head, head + len(tail))
            at.extend([head - 1, *range(start, end - 1)])
            target.extend(tail)
        row_index.extend([index] * (len(at) - len(row_index)))
    sees = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
    sees &= torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    hidden = model.model(input_ids=ids, attention_mask=sees[:, None], position_ids=places, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[torch.tensor(row_index), torch.tensor(at)])
    return torch.nn.functional.cross_entropy(logits, torch.tensor(target))
