"""The tuning task: measure one candidate and store the result."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.tuning_folder import LOGS, write_result
from tuning.candidates import Candidate
from tuning.job import Job, Measured
from tuning.process import measure_in_process


@task(
    name="measure-candidate",
    task_run_name="measure-{label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=0,
    tags=["tune"],
)
async def measure_candidate(
    label: str, folder: Path, candidate: Candidate, job: Job, timeout_s: float, name: str = ""
) -> Measured:
    """Measure a candidate in its own process. Store the result under `name`, or as the candidate's result in the grid."""
    log = folder / LOGS / f"{name or candidate.key}.log"
    measured = await measure_in_process(job, log, timeout_s=timeout_s)
    write_result(folder, candidate, measured, name)
    return measured
