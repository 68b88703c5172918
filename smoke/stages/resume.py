"""Kills a run in its second step and resumes it: on a CPU it must end with the very weights of the run that nobody killed."""

from smoke.job import Found, Job, StageFailed
from smoke.training_run import STEPS, kill_in_step, train, weights
from storage.runs import RunPaths


def run(job: Job) -> Found:
    """Compare with the run of the stage `steps`."""
    kill_in_step(job, "killed", 2)
    summary = train(job, "killed", "--resume").summary
    if summary["steps"] != STEPS:
        raise StageFailed(f"the resumed run did {summary['steps']} of {STEPS} steps")
    whole, killed = (weights(RunPaths(job.runs / name)) for name in ("steps", "killed"))
    same = sum(one == other for one, other in zip(whole, killed, strict=True)) / STEPS
    if job.device == "cpu" and same < 1:
        raise StageFailed(f"{same:.0%} of the adapters equal those of the run that was not killed", figures={"same_share": same})
    return Found(
        sentence=f"killed in step 2 and resumed; {same:.0%} of the adapters equal, byte for byte, those of the run beside it",
        figures={"same_share": same},
        notes=[] if job.device == "cpu" else ["equal adapters are not promised on a card"],
    )
