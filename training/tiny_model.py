"""The model made on the spot: no hub, no account, a minute or so of CPU.

A byte-level BPE tokenizer trained on prompts and orders, a Qwen3 of about a million parameters, and a warm-up in
which it imitates a
scripted player, so that LoRA has something to adapt (on a random base it stalls at half the gain). The result is an ordinary
`save_pretrained` folder, cached by the hash of its recipe; any hub id or local folder serves in its place.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.board import Board
from game.notation import answer_lines
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import board_text, power_text, rules_text
from training.recipe import longest_sequence, recipe_hash
from training.settings import TinyModelSettings

_EOS = "<|end|>"
_LAST_YEAR = 1907

OnProgress = Callable[[str, int, int], None]
"""Told the stage, steps done and steps in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """One position of a teacher's game, and what it ordered for each power there."""

    shared: tuple[str, str]
    """Rules and board: the part of the prompt that is the same for all powers."""
    decisions: tuple[tuple[str, tuple[str, ...]], ...]
    """Per power: the rest of its prompt, and the lines of the teacher's answer."""


def make_tiny_model(
    root: Path, settings: TinyModelSettings, on_progress: OnProgress | None = None, prompts: PromptSettings = DEFAULT_PROMPTS
) -> Path:
    """Folder of the tiny model under `root`, made now if this recipe has not been made before.

    Returns:
        `root`/tiny-<recipe hash>, in the layout of `save_pretrained`.
    """
    report = on_progress or (lambda stage, done, total: None)
    final = root / f"tiny-{recipe_hash(settings, prompts)}"
    if (final / "recipe.json").is_file():
        return final
    aside = root / f".{final.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _make(aside, settings, prompts, report)
        if final.exists():
            shutil.rmtree(final)  # a folder without recipe.json: cut by an earlier kill
        os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _make(folder: Path, settings: TinyModelSettings, prompts: PromptSettings, report: OnProgress) -> None:
    positions = []
    for number in range(settings.source_games):
        positions.extend(_teacher_game(settings, prompts, number))
        report("scripted games", number + 1, settings.source_games)
    _save_tokenizer(positions, settings, folder)
    model = _new_model(settings, prompts, folder)
    model.config.save_pretrained(folder)
    losses = _imitate(model, positions, settings, Codec(folder), report)
    disable_progress_bar()  # ours is the progress that is shown
    model.save_pretrained(folder)
    recipe = {"settings": settings.model_dump(), "parameters": model.num_parameters(), "loss": losses}
    if prompts != DEFAULT_PROMPTS:
        recipe["prompts"] = prompts.model_dump()
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=1))


def _teacher_game(settings: TinyModelSettings, prompts: PromptSettings, number: int) -> Iterator[_Position]:
    """Positions of one game in which the teacher plays every power; forced order sets teach nothing and are left out."""
    teacher, dice, board = (
        player(settings.teacher),
        random.Random(f"imitation-{settings.seed}-{number}"),
        Board.start(),
    )
    while not board.is_over and board.year <= _LAST_YEAR:
        legal = board.legal_orders()
        orders = {power: teacher(choice, dice, board) for power, choice in legal.items()}
        open_choices = [power for power, choice in legal.items() if not choice.is_forced]
        if open_choices:
            yield _Position(
                shared=(rules_text(prompts), board_text(board)),
                decisions=tuple(
                    (
                        power_text(legal[power], board, prompts),
                        tuple(answer_lines(orders[power], legal[power], prompts.order_notation)),
                    )
                    for power in open_choices
                ),
            )
        board.step(orders)


def _save_tokenizer(positions: list[_Position], settings: TinyModelSettings, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    # Line breaks stand alone, so that the order separator is one token; words carry their leading space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        "".join(position.shared) + "".join(rest + "\n".join(lines) for rest, lines in position.decisions)
        for position in positions
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS).save_pretrained(str(folder))


def _new_model(settings: TinyModelSettings, prompts: PromptSettings, folder: Path) -> Qwen3ForCausalLM:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(_EOS)
    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=max(1, settings.hidden // 64),
        head_dim=32,
        max_position_embeddings=longest_sequence(prompts),
        tie_word_embeddings=True,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=eos,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """A prompt's shared head once, and after it each decision's own tail (rest of the prompt, completion), as token ids."""

    head: list[int]
    tails: list[tuple[list[int], list[int]]]


def _imitate(
    model: Qwen3ForCausalLM,
    positions: list[_Position],
    settings: TinyModelSettings,
    codec: Codec,
    report: OnProgress,
) -> list[float]:
    """Learn the language of prompts and orders, whole; losses, nats a token, every 20 steps.

    Orders are predicted over the whole vocabulary, so that legal tokens gain their mass; boards too, and a power's own units,
    which repeat what the board says: so the model learns to read the board, which imitation alone never asks of it.
    """
    spell = TableBuilder(codec).spell_lines
    rows = [
        SharedRow(
            head=codec.encode_prompt(position.shared),
            tails=[(codec.encode_prompt([rest]), spell(lines)) for rest, lines in position.decisions],
        )
        for position in positions
    ]
    order = np.random.default_rng(settings.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.imitation_rate, weight_decay=0.01)
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
    """Mean cross-entropy, nats, of every token of heads and tails, with each head computed once.

    A tail sees its head and itself, never another tail, and its positions go on from the head's end: exactly what it
    would see as a prompt of its own (tested against that).
    """
    shape = len(rows), max(len(row.head) + sum(len(rest) + len(completion) for rest, completion in row.tails) for row in rows)
    ids, places = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)  # padding sees padding alone, so that no softmax is empty
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
