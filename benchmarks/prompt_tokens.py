"""`prompts`: the number of tokens of prompts and completions, beside indented JSON; if asked, what imitation learns from them.

Whole decisions of scripted games are counted with a general tokenizer (the tekken file of `mistral_common`, which vLLM installs)
and optionally with that of the tiny model. The JSON prompt has the same content: rules, units and centres of every power, and the
legal orders of the power. The tiny tokenizer learned only the default form, so only its figures of `none` and `full` are those of
a run.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.outcome import Outcome, Target
from game.board import POWERS, Board
from game.legal import LegalOrders
from game.notation import answer_lines
from game.players import player
from game.prompt_settings import PromptSettings
from game.prompts import board_text, power_text, rules_text
from telemetry.errors import InputError

GENERAL = "tekken_240911.json"
"""A general tokenizer of 131,072 tokens in the data of `mistral_common`."""
TARGETS = {"prompt_tokens_ratio": Target(at_least=3.0), "completion_tokens_ratio": Target(at_least=1.5)}
WAYS = {
    "none": PromptSettings(),
    "factored": PromptSettings(legal_orders="factored"),
    "lines": PromptSettings(legal_orders="lines"),
    "neighbours": PromptSettings(facts="neighbours"),
    "threats": PromptSettings(facts="threats"),
    "slot": PromptSettings(order_notation="slot"),
    "factored_slot": PromptSettings(legal_orders="factored", order_notation="slot"),
}
_FIRST_YEAR, _LAST_YEAR = 1904, 1906
_TEACHER_GAMES = 200
"""Games that imitation learns from, or holds out: about 5,000 positions."""

Count = Callable[[str], int]
"""Counts the tokens of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One decision in a movement phase."""

    board: Board
    legal: LegalOrders
    orders: list[str]


def bench_prompts(*, games: int = 12, seed: int = 0, tiny: Path | None = None, imitate_s: float = 0) -> Outcome:
    """Mean tokens of a decision in each form, two ratios, and what imitation learns from some forms.

    Args:
        tiny: folder of a tiny model, to count with its tokenizer as well.
        imitate_s: CPU seconds of imitation for each form of `prompt_losses`; 0: none.

    Raises:
        InputError: there are no decisions, or no general tokenizer.
    """
    cases = decisions(games, seed)
    if not cases:
        raise InputError(f"There is no decision in {games} games: ask for at least 1.")
    metrics = {"decisions": float(len(cases)), **_figures(cases, general_tokenizer(), "")}
    if tiny is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        metrics |= _figures(cases, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), "tiny_")
    if imitate_s:
        from benchmarks.prompt_losses import prompt_losses  # imported here because it loads torch
        from training.imitation.settings import ImitationSettings

        with TemporaryDirectory() as scratch:
            metrics |= prompt_losses(Path(scratch), ImitationSettings(games=_TEACHER_GAMES, seed=seed), imitate_s)
    return Outcome(benchmark="prompts", metrics=metrics, targets=TARGETS)


def decisions(games: int, seed: int) -> list[Case]:
    """Every open decision of the movement phases of 1904 to 1906, in games of movers."""
    found = []
    for game in range(games):
        rng, board = random.Random(f"prompts {seed} {game}"), Board.start()
        while not board.is_over and board.year <= _LAST_YEAR:
            legal = board.legal_orders()
            orders = {power: player("mover")(own, rng, board) for power, own in legal.items()}
            if board.year >= _FIRST_YEAR and board.phase_type == "M":
                kept = board.fork()
                found += [Case(board=kept, legal=own, orders=orders[power]) for power, own in legal.items() if not own.is_forced]
            board.step(orders)
    return found


def json_prompt(board: Board, legal: LegalOrders) -> str:
    """The old prompt: the rules, then the position and all legal orders as indented JSON."""
    units, centres = board.units(), board.centres()
    return (
        rules_text()
        + json.dumps(
            {
                "phase": board.phase,
                "power": legal.power,
                "units": {power: units[power] for power in POWERS},
                "centers": {power: centres[power] for power in POWERS},
                "legal_orders": dict(zip(legal.sites, legal.options, strict=True)),
            },
            indent=2,
        )
        + "\nORDERS:\n"
    )


def general_tokenizer() -> Count:
    """A counter that uses `general_tokens`."""
    tokenizer = general_tokens()
    return lambda text: len(tokenizer.encode(text, bos=False, eos=False))


def general_tokens() -> Any:
    """The tokenizer in the file GENERAL of the installed `mistral_common`.

    Raises:
        InputError: the package or the file is missing.
    """
    try:
        import mistral_common
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError as error:
        raise InputError("The general tokenizer comes with vLLM: install the extra 'cpu' or 'gpu'.") from error
    file = Path(str(mistral_common.__file__)).parent / "data" / GENERAL
    if not file.is_file():
        raise InputError(f"The installed mistral_common ships no {GENERAL}: install the locked version.")
    return Tekkenizer.from_file(file)


def _figures(cases: list[Case], count: Count, prefix: str) -> dict[str, float]:
    # Segments are encoded separately, so the rules, which all prompts share, are counted once.
    def mean(values: Iterable[int]) -> float:
        return sum(values) / len(cases)

    figures = {"json_prompt_tokens": mean(count(json_prompt(case.board, case.legal)) for case in cases)}
    for name, way in WAYS.items():
        rules = count(rules_text(way))
        figures[f"{name}_prompt_tokens"] = mean(
            rules + count(board_text(case.board, case.legal.power, way)) + count(power_text(case.legal, case.board, way))
            for case in cases
        )
    for notation in ("full", "slot"):
        # Each line has one more token: a line break, or the end mark after the last.
        figures[f"{notation}_completion_tokens"] = mean(
            sum(count(line) + 1 for line in answer_lines(case.orders, case.legal, notation)) for case in cases
        )
    figures["prompt_tokens_ratio"] = figures["json_prompt_tokens"] / figures["factored_prompt_tokens"]
    figures["completion_tokens_ratio"] = figures["full_completion_tokens"] / figures["slot_completion_tokens"]
    return {prefix + name: value for name, value in figures.items()}
