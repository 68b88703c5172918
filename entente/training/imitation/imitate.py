"""Makes a base model that imitates a teacher: games, tokenizer, training, and a `save_pretrained` folder.

Work in progress is in `.<name>.imitation` beside the models. A step depends only on settings, step number and the state before
it, so a killed and resumed imitation gives the same bytes.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from entente.decoding.codec import Codec
from entente.decoding.model_files import RECIPE
from entente.decoding.weight_files import WEIGHTS, load_whole, usual_mode
from entente.game.prompts import ANSWER_CUE, THOUGHT_CUE, board_text, power_text, rules_text
from entente.telemetry.errors import InputError, TrainingError
from entente.telemetry.progress import reporter
from entente.training.imitation.accuracy import accuracy_sentences, accuracy_table
from entente.training.imitation.checkpoint import CurvePoint, load_state, save_state
from entente.training.imitation.examples import Example, Examples
from entente.training.imitation.loss import backward, measure
from entente.training.imitation.muon import MuonAndAdamW
from entente.training.imitation.positions import Positions
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.work import WorkFolder, begun_labels
from entente.training.settings import longest_sequence
from entente.training.small_model import new_model, save_tokenizer, wanted_centres
from storage.files import file_lock, publish_directory
from storage.labels import read_labels

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_TOKENIZER_POSITIONS = 1500
"""Positions to train the tokenizer on: about fifty games, which have every word many times."""
_HELD_OUT_EXAMPLES = 512
"""Decisions per measurement: about 2,000 orders, so shares are accurate to 2 points."""
_ACCURACY_EXAMPLES = 4096
"""Decisions of each table of order accuracy: about 16,000 orders."""
_MAX_GRADIENT_NORM = 1.0
_WEIGHT_DECAY = 0.01


def imitate(work: WorkFolder, settings: ImitationSettings, games: Path) -> Path:
    """Train from the newest checkpoint and publish the model.

    Raises InputError if the folder is in use or games are too few, or as `read_labels`; DataError if a shard is damaged."""
    with file_lock(work.root / ".lock") as mine:
        if not mine:
            raise InputError(f"another process makes the model '{work.final.name}': wait for it, or choose another name")
        if work.final.exists():  # the process was killed after publishing
            return work.final
        labelled = read_labels(settings.labels, begun_labels(work))
        positions = Positions(games, None if settings.recorded else settings.games, labelled)
        if not (work.root / "config.json").is_file():
            prepare(work.root, settings, positions)
        trainer = Imitation(work.root, settings, positions)
        trainer.run()
        _publish(work, settings, trainer)
    return work.final


def prepare(folder: Path, settings: ImitationSettings, positions: Positions) -> None:
    """The config is written last: its presence shows that all is complete."""
    reporter().stage("tokenizer", 0, 1)
    if settings.begin_with is not None:
        for name in (*_TOKENIZER, WEIGHTS, RECIPE, "config.json"):
            shutil.copy(settings.begin_with / name, folder / name)
    else:
        save_tokenizer(_texts(settings, positions), settings.vocabulary, folder)
        _network(folder, settings).config.save_pretrained(folder)
    reporter().stage("tokenizer", 1, 1)


def _network(folder: Path, settings: ImitationSettings) -> Qwen3ForCausalLM:
    if settings.begin_with is not None:
        disable_progress_bar()  # the reporter shows the progress
        return load_whole(Qwen3ForCausalLM.from_pretrained, folder, named=settings.begin_with, dtype=torch.float32)
    longest = longest_sequence(settings.prompts)
    return new_model(folder, hidden=settings.hidden, layers=settings.layers, longest=longest, seed=settings.seed)


def _texts(settings: ImitationSettings, positions: Positions) -> Iterator[str]:
    prompts = settings.prompts
    for number in islice(positions.spread(held_out=False), _TOKENIZER_POSITIONS):
        board, orders = positions.board(number)
        for power, own in orders.items():
            legal = board.legal_orders()[power]
            thought = " ".join(wanted_centres(board, power, own)) + "\n" + ANSWER_CUE if prompts.thinking_tokens else ""
            cue = THOUGHT_CUE if prompts.thinking_tokens else ANSWER_CUE
            prompt = rules_text(prompts) + board_text(board, power, prompts) + power_text(legal, board, prompts, cue)
            yield prompt + thought + "\n".join(own)


class Imitation:
    def __init__(self, folder: Path, settings: ImitationSettings, positions: Positions) -> None:
        self.settings, self.positions = settings, positions
        codec = Codec(folder)
        self.examples, self.separator = Examples(codec, settings.prompts), codec.separator_id
        self.model: Any = _network(folder, settings).train()
        self.optimiser = MuonAndAdamW(self.model, rate=settings.learning_rate, decay=_WEIGHT_DECAY)
        self.checkpoints = folder / "checkpoints"
        self.state = load_state(self.checkpoints, self.model, self.optimiser)

    def run(self) -> None:
        settings, state = self.settings, self.state
        saved = began = time.monotonic()
        tokens_before = state.tokens
        if not state.curve:
            self._add_point()
        while state.step < settings.steps:
            self.step()
            reporter().stage("imitation", state.step, settings.steps)
            if state.step % settings.eval_every == 0 or state.step == settings.steps:
                self._add_point()
                speed = (state.tokens - tokens_before) / (time.monotonic() - began)
                reporter().say(f"{curve_line(state.curve[-1], settings.steps)}, {speed:,.0f} tokens/s")
            if time.monotonic() - saved >= 60 * settings.checkpoint_minutes:
                save_state(self.checkpoints, state, self.model, self.optimiser)
                saved = time.monotonic()

    def step(self) -> None:
        settings, state = self.settings, self.state
        numbers = self.positions.of_step(state.step, settings.positions, settings.seed)
        examples = [example for number in numbers for example in self._examples(number)]
        if examples:
            self.optimiser.zero_grad(set_to_none=True)
            loss, tokens = backward(self.model, examples, settings.prompt_weight)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss of step {state.step + 1} is not finite: lower --learning-rate and start again")
            state.losses.append(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
            for group in self.optimiser.param_groups:
                group["lr"] = settings.rates.rate_at(state.step + 1)
            self.optimiser.step()
            state.tokens += tokens
        state.step += 1

    def _examples(self, number: int, *, legal_sets: bool = False) -> Iterator[Example]:
        return self.examples.of(*self.positions.board(number), legal_sets=legal_sets)

    @cached_property
    def held_out(self) -> list[Example]:
        return self._sample(_HELD_OUT_EXAMPLES, held_out=True, labels=True if self.settings.labels else None)

    def _sample(self, count: int, *, held_out: bool, labels: bool | None) -> list[Example]:
        spread = self.positions.spread(held_out=held_out, labels=labels)
        return list(islice((each for number in spread for each in self._examples(number, legal_sets=True)), count))

    def accuracy(self) -> dict[str, dict[str, Any]]:
        """Tables of order accuracy by source: games, labels, and labels that were learned from, which shows memorising."""
        parts = {"games": (True, False), "labels": (True, True), "labels learned": (False, True)}
        tables = {}
        for name, (held_out, labels) in parts.items():
            if examples := self._sample(_ACCURACY_EXAMPLES, held_out=held_out, labels=labels):
                tables[name] = accuracy_table(examples, measure(self.model, examples, self.separator))
        return tables

    def _add_point(self) -> None:
        state, figures = self.state, measure(self.model, self.held_out, self.separator)
        loss = fmean(state.losses) if state.losses else None
        own = {"completion_loss": figures.completion_loss, "order_loss": figures.order_loss, "orders_equal": figures.orders_equal}
        state.curve.append(CurvePoint(step=state.step, tokens=state.tokens, loss=loss, **own))
        state.losses.clear()


def curve_line(point: CurvePoint, steps: int) -> str:
    loss = "" if point.loss is None else f"loss {point.loss:.3f}, "
    return (
        f"step {point.step}/{steps}: {loss}held out: {point.order_loss:.3f} nats per order token, "
        f"{point.completion_loss:.3f} per completion token, {point.orders_equal:.1%} of orders equal"
    )


def write_model(trained: Imitation, folder: Path, recipe: dict[str, Any]) -> None:
    """The recipe is written last."""
    disable_progress_bar()
    trained.model.save_pretrained(folder)
    usual_mode(folder / WEIGHTS)
    about = {"prompts": trained.settings.prompts.model_dump(), "parameters": trained.model.num_parameters()}
    (folder / RECIPE).write_text(json.dumps(recipe | about, indent=1))


def _publish(work: WorkFolder, settings: ImitationSettings, trained: Imitation) -> None:
    aside = work.root / "model"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name in _TOKENIZER:
        shutil.copy(work.root / name, aside / name)
    curve, accuracy = [asdict(point) for point in trained.state.curve], trained.accuracy()
    for sentence in accuracy_sentences(accuracy):
        reporter().say(sentence)
    shape = set[str]() if settings.begin_with is None else {"vocabulary", "hidden", "layers"}
    stored = settings.model_dump(mode="json", exclude={"prompts"} | shape, exclude_none=True)
    recipe = {"settings": stored, "curve": curve, "accuracy": accuracy}
    if settings.begin_with is not None:
        recipe["begun_with"] = json.loads((work.root / RECIPE).read_text())
    write_model(trained, aside, recipe)
    publish_directory(aside, work.final)
