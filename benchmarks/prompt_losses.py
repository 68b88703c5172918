"""What imitation learns from prompts of each form in equal CPU time.

Every arm has a network of the same shape, the same games and positions, and a tokenizer of its own. Its number of steps follows
from the CPU time of its first steps, so its learning rate falls to the end. Making prompts is part of a step; games, tokenizers
and measurements are not. Token losses compare arms as far as their tokenizers spell orders alike; shares of orders always do.
"""

from pathlib import Path
from statistics import fmean

from benchmarks.outcome import timed
from game.prompt_settings import PromptSettings
from telemetry.progress import reporter
from training.imitation.imitate import Imitation, prepare
from training.imitation.loss import measure
from training.imitation.positions import Positions
from training.imitation.settings import ImitationSettings
from training.imitation.teacher_games import make_games

ARMS = {
    "last": PromptSettings(),
    "in_place": PromptSettings(own_line="in_place"),
    "neighbours": PromptSettings(own_line="in_place", facts="neighbours"),
    "threats": PromptSettings(own_line="in_place", facts="threats"),
    "factored": PromptSettings(own_line="in_place", legal_orders="factored"),
}
"""A step has the decisions of all powers of its positions, which share a board that is written in place."""
_WARM_UP_STEPS, _TIMED_STEPS = 2, 8


def prompt_losses(scratch: Path, settings: ImitationSettings, cpu_s: float) -> dict[str, float]:
    """Held-out figures of each arm after about `cpu_s` CPU seconds of steps.

    Args:
        scratch: an empty folder.
        settings: games, network and seed of every arm; steps and prompts are the arm's.
    """
    positions = Positions(make_games(scratch / "games", settings, 1, reporter().stage), settings.games)
    figures: dict[str, float] = {}
    for name, prompts in ARMS.items():
        arm, folder = settings.model_copy(update={"prompts": prompts}), scratch / name
        folder.mkdir()
        prepare(folder, arm, positions)
        rehearsed = Imitation(folder, arm, positions)
        step_s = fmean([timed(rehearsed.step)[0] for _ in range(_WARM_UP_STEPS + _TIMED_STEPS)][_WARM_UP_STEPS:])
        arm = arm.model_copy(update={"steps": max(1, round(cpu_s / step_s))})
        trained, spent_s = Imitation(folder, arm, positions), 0.0
        for number in range(arm.steps):
            spent_s += timed(trained.step)[0]
            reporter().stage(f"imitation, {name}", number + 1, arm.steps)
        found = measure(trained.model, trained.held_out, trained.separator)
        reporter().say(f"{name}: {found.order_loss:.3f} nats per order token, {found.orders_equal:.1%} of orders equal")
        figures |= {
            f"{name}_order_loss_nats": found.order_loss,
            f"{name}_orders_equal_share": found.orders_equal,
            f"{name}_imitation_steps": float(arm.steps),
            f"{name}_imitation_cpu_s": spent_s,
            f"{name}_held_out_prompt_tokens": fmean(each.prompt for each in trained.held_out),
            f"{name}_longest_held_out_tokens": float(max(len(each.ids) for each in trained.held_out)),
        }
    return figures
