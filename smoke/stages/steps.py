"""Trains three real steps with the recommended settings: games, engine, trainer and files together."""

from statistics import median

from smoke.job import Found, Job, StageFailed
from smoke.training_run import STEPS, forget, train, weights


def run(job: Job) -> Found:
    """The run's own figures."""
    paths = forget(job, "steps")
    found = train(job, "steps")
    summary = found.summary
    figures = {
        "step_s": median(found.settled("time/step_s")),
        "rollout_s": median(found.settled("time/rollout_s")),
        "train_s": median(found.settled("time/train_s")),
        "decisions": float(summary["decisions"]),
        "orders_rejected": float(summary["orders_rejected"]),
        "wall_s": float(summary["wall_s"]),
    }
    if summary["steps"] != STEPS or summary["orders_rejected"]:
        raise StageFailed(
            f"{summary['steps']} of {STEPS} steps are done and {summary['orders_rejected']} orders were rejected", figures=figures
        )
    if len(set(weights(paths))) == 1:
        raise StageFailed("no step changed the adapter", "training.learning_rate", figures)
    return Found(
        sentence=f"{STEPS} steps and two scores in {figures['wall_s']:.0f} s, {figures['decisions']:.0f} decisions; a step takes "
        f"{figures['step_s']:.1f} s once warm",
        figures=figures,
    )
