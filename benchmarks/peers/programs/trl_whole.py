"""TRL's whole GRPO trainer, with rewards from the parent: `python -m benchmarks.peers.programs.trl_whole`.

It trains until its CPU seconds, with those of the rewards, reach the budget, and saves its adapter.
"""

import tempfile
import time
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from benchmarks.peers.programs.answer import ask, serve
from benchmarks.peers.programs.trl_trainer import trainer_of


class Clock:
    """CPU seconds since training began: those of this process, and those that the parent needed for rewards."""

    def __init__(self) -> None:
        self.began = time.process_time()
        self.rewards_s = 0.0
        self.sampling_s = 0.0

    def spent_s(self) -> float:
        """All of them."""
        return time.process_time() - self.began + self.rewards_s


class StopAtBudget(TrainerCallback):
    """Ends training when the budget is spent, and remembers where the first batch of completions ended."""

    def __init__(self, clock: Clock, budget_s: float, updates: int) -> None:
        self._clock, self._budget_s, self._updates = clock, budget_s, updates
        self.first_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called after each update."""
        if state.global_step == self._updates:
            self.first_s = self._clock.spent_s()
        if state.global_step % self._updates == 0 and self._clock.spent_s() >= self._budget_s:
            control.should_training_stop = True


def train(given: Any) -> Mapping[str, Any]:
    """Train; answers decisions and CPU seconds after the first batch of completions, and shares of the time."""
    clock = Clock()

    def reward(completions: list[str], number: list[int], **more: Any) -> list[float]:
        reply = ask({"numbers": number, "texts": completions})
        clock.rewards_s += reply["cpu_s"]
        return reply["rewards"]

    updates = given["updates"]
    rows_a_step = given["groups"] * given["forks"] // updates
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder:
        trainer = trainer_of(
            given["settings"],
            given["prompts"],
            reward,
            folder,
            per_device_train_batch_size=rows_a_step,
            steps_per_generation=updates,
            num_generations=given["forks"],
            max_completion_length=given["longest"],
            max_steps=1_000_000,
        )
        generate = trainer.model.generate

        def timed(*words: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return generate(*words, **named)
            finally:
                clock.sampling_s += time.process_time() - began

        trainer.model.generate = timed
        stop = StopAtBudget(clock, given["budget_s"], updates)
        trainer.add_callback(stop)
        clock.began = time.process_time()
        trainer.train()
        spent_s, steps = clock.spent_s(), trainer.state.global_step
        trainer.model.save_pretrained(given["folder"])
    if steps <= updates:
        raise ValueError("the budget ended within the first batch of completions: give more steps")
    return {
        "decisions": (steps - updates) * rows_a_step,
        "cpu_s": spent_s - stop.first_s,
        "steps": steps // updates,
        "game_share": clock.rewards_s / spent_s,
        "sampling_share": clock.sampling_s / spent_s,
    }


if __name__ == "__main__":
    serve({"train": train})
