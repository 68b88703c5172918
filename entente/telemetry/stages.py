"""Names of the stages of a training step, for the report, `runs explain` and `watch`.

Stages do not overlap and add up to the step. Of rollouts only the time counts in which nothing else was done."""

from collections.abc import Mapping

STAGES = {
    "rollouts": "waiting for rollouts",
    "compare": "comparing trainer and engine",
    "select": "choosing and gathering rows",
    "plan": "planning what is shared",
    "forward": "forward passes",
    "backward": "backward passes",
    "optimiser": "the loss and the optimiser",
    "save": "checkpoint and adapter",
    "publish": "a new version for the engine",
    "score": "scoring a version",
    "orchestration": "Prefect, and handing over",
}
UPDATE = ("forward", "backward", "optimiser")
TRAINER_STAGES = ("select", "plan", *UPDATE, "save")


def trainer_stages_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage; a missing metric counts as 0."""
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
    """Seconds by stage, which add up to the step; the rest is orchestration."""
    rollouts, compare, publish, score = (
        figures.get(f"time/{name}_s", 0.0) for name in ("rollout_wait", "compare", "publish", "score")
    )
    stages = {"rollouts": rollouts, "compare": compare, **trainer_stages_of(figures), "publish": publish, "score": score}
    # A step that was replayed after a kill has the trainer's earlier metrics, so limit each stage to the step's duration.
    left = figures.get("time/step_s", 0.0)
    for stage, seconds in stages.items():
        stages[stage] = min(seconds, left)
        left -= stages[stage]
    return stages | {"orchestration": left}
