"""TRL's GRPOTrainer on the game: `python -m integrations.trl_grpo --model models/dumbbot-192 --cache runs/_state_cache/v-…`.

Prompts are positions of a state cache. The reward of a completion is what its orders gain (`integrations.questions`). Plainly,
TRL samples text, and a unit without a legal order holds. With --legal-orders each completion is drawn under our legal table.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoding.codec import Codec
from decoding.model_files import recipe_prompts
from game.board import Board
from game.prompt_settings import DEFAULT_PROMPTS
from integrations.questions import Question, questions_of, read_orders, score_orders, text_for
from integrations.trl_trainer import trainer_of
from rollouts.deciders import Tokens
from rollouts.settings import RolloutSettings
from state_cache.store import open_cache
from telemetry.errors import EntenteError, InputError
from training.settings import TrainingSettings

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers that an adapter changes by default."""
_EXAMPLES = """examples:
  python -m integrations.trl_grpo --model models/dumbbot-192 --cache runs/_state_cache/v-0123456789ab --steps 3
  python -m integrations.trl_grpo --model models/dumbbot-192 --cache runs/_state_cache/v-0123456789ab --legal-orders
"""


def trl_settings(model: Path, training: TrainingSettings) -> dict[str, object]:
    """What `trainer_of` needs to train like us."""
    return {
        "model": str(model),
        "rank": training.lora_rank,
        "alpha": training.lora_alpha,
        "layers": list(training.lora_targets) or LAYERS,
        "learning_rate": training.learning_rate,
        "max_gradient_norm": training.max_gradient_norm,
        "clip_low": training.clip_low,
        "clip_high": training.clip_high,
        "dual_clip": training.dual_clip,
        "seed": training.seed,
    }


class CentresGained:
    """TRL's reward function: the centres that a completion's orders gain, until `rollouts.horizon_years` later."""

    def __init__(self, questions: Sequence[Question], tokens: Tokens, rollouts: RolloutSettings) -> None:
        self._questions, self._tokens, self._rollouts = questions, tokens, rollouts
        self.__name__ = "centres_gained"  # TRL logs a reward function under its name
        self.rewards: list[float] = []
        """Mean of each batch."""
        self.ordered: list[float] = []
        """Share of each batch's units that got a legal order."""

    def __call__(self, completions: list[str], number: list[int], **more: Any) -> list[float]:
        """`number`: of each completion's question. Completions of one batch share their luck."""
        return asyncio.run(self._score(completions, number))

    async def _score(self, completions: list[str], numbers: list[int]) -> list[float]:
        asked = [self._questions[number] for number in numbers]
        notation = self._tokens.prompts.order_notation
        read = [read_orders(text, question.legal, notation) for text, question in zip(completions, asked, strict=True)]
        found = await asyncio.gather(
            *(
                score_orders(question, orders, self._rollouts, shared=f"trl/{len(self.rewards)}", name=str(place))
                for place, (question, (orders, _)) in enumerate(zip(asked, read, strict=True))
            )
        )
        rewards = [components["centres_gained"] for components in found]
        self.rewards.append(sum(rewards) / len(rewards))
        self.ordered.append(sum(ordered for _, ordered in read) / sum(len(orders) for orders, _ in read))
        sys.stdout.write(
            f"step {len(self.rewards)}: {self.rewards[-1]:+.2f} centres a completion, "
            f"{self.ordered[-1]:.0%} of the units got a legal order\n"
        )
        return rewards


def train(
    model: Path,
    cache: Path,
    *,
    steps: int,
    groups: int,
    generations: int,
    years: int,
    legal_orders: bool,
    output: Path | None,
    seed: int = 0,
) -> CentresGained:
    """Train an adapter for `steps` steps of `groups` times `generations` completions; returns the rewards.

    Raises:
        InputError: the model or the cache cannot be used, or `output` exists.
    """
    from transformers import PrinterCallback

    if not (model / "tokenizer.json").is_file():
        raise InputError(f"'{model}' holds no model: give the folder of one, such as models/dumbbot-192")
    if output is not None and output.exists():
        raise InputError(f"'{output}' exists: give another --output, or move it away")
    tokens = Tokens(Codec(model), recipe_prompts(model) or DEFAULT_PROMPTS)
    questions = questions_of(open_cache(cache).train, seed=seed, text=text_for(tokens))
    tables = {question.text: tokens.tables.table(question.legal) for question in questions}
    reward = CentresGained(questions, tokens, RolloutSettings(horizon_years=years))
    roll_out = None
    if legal_orders:
        from integrations.legal_rollouts import legal_rollouts

        roll_out = legal_rollouts({each.text: _ids(tokens, each) for each in questions}, tables)
    training = TrainingSettings(learning_rate=1e-3, seed=seed)
    with tempfile.TemporaryDirectory(prefix="entente-trl-") as folder:
        trainer = trainer_of(
            trl_settings(model, training),
            [{"prompt": question.text, "number": number} for number, question in enumerate(questions)],
            reward,
            folder,
            roll_out=roll_out,
            per_device_train_batch_size=groups * generations,
            num_generations=generations,
            max_completion_length=max(table.longest for table in tables.values()),
            max_steps=steps,
        )
        trainer.remove_callback(PrinterCallback)  # it would print all figures of TRL at the end
        trainer.train()
        if output is not None:
            trainer.model.save_pretrained(output)
    return reward


def _ids(tokens: Tokens, question: Question) -> list[int]:
    board = Board.restore(question.snapshot)
    ids = tokens.prompt_ids(board, question.legal)
    board.release()
    return ids


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = command_line().parse_args(words)
    try:
        train(**vars(given))
    except EntenteError as error:
        sys.stderr.write(f"trl_grpo: {error}\n")
        return error.exit_code
    return 0


def command_line() -> argparse.ArgumentParser:
    """The command's arguments: those of `train`."""
    parser = argparse.ArgumentParser(
        prog="python -m integrations.trl_grpo",
        description="Train an adapter with TRL's GRPOTrainer on positions of a state cache, on the CPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--cache", type=Path, required=True, help="folder of a state cache, as `entente cache show` lists them")
    parser.add_argument("--steps", type=_whole(1), default=3, help="optimiser steps (%(default)s)")
    parser.add_argument("--groups", type=_whole(1), default=4, help="positions a step (%(default)s)")
    parser.add_argument("--generations", type=_whole(2), default=4, help="completions of a position (%(default)s)")
    parser.add_argument("--years", type=_whole(1, 20), default=1, help="game years that an answer is played for (%(default)s)")
    parser.add_argument("--legal-orders", action="store_true", help="draw completions under our legal table (TRL's rollout_func)")
    parser.add_argument("--output", type=Path, help="folder for the adapter")
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
