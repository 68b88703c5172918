"""The stages of a training step: one list and one word for each, for the report, `runs explain`, `watch` and `bench profile`.

A step is one line of time, so its stages add up to it. Rollouts that run while the trainer trains are not in it: what counts is
the wait for them.
"""

from collections.abc import Mapping

STAGES = {
    "rollouts": "waiting for rollouts",
    "select": "choosing and gathering rows",
    "plan": "planning what is shared",
    "forward": "forward passes",
    "backward": "backward passes",
    "optimiser": "the loss and the optimiser",
    "save": "checkpoint and adapter",
    "publish": "a new version for the engine",
    "orchestration": "Prefect, and handing over",
}
"""Stage of a step -> what happens in it, in the order of a step."""
UPDATE = ("forward", "backward", "optimiser")
"""Stages that compute an update."""
TRAINER_STAGES = ("select", "plan", *UPDATE, "save")
"""Stages of the trainer's process."""


def trainer_stages_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step of the trainer by stage; a figure that the step lacks counts as none."""
    get = figures.get
    plan, forward, backward = (get(f"train/{name}_s", 0.0) for name in ("plan", "forward", "backward"))
    return {
        "select": get("train/select_s", 0.0),
        "plan": plan,
        "forward": forward,
        "backward": backward,
        "optimiser": max(0.0, get("train/update_s", 0.0) - plan - forward - backward),
        "save": get("train/save_s", 0.0),
    }


def stages_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step by stage; they add up to the step, and what no figure names is orchestration."""
    found = {"rollouts": figures.get("time/rollout_wait_s", 0.0), **trainer_stages_of(figures)}
    found["publish"] = figures.get("time/publish_s", 0.0)
    # A step that was repeated after a kill has its trainer's figures from before it: no stage may exceed the whole.
    left = figures.get("time/step_s", 0.0)
    for stage, seconds in found.items():
        found[stage] = min(seconds, left)
        left -= found[stage]
    return found | {"orchestration": left}
