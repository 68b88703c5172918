"""Flow: play rollouts for a run that trains in another process (`pipeline/produce.py`). `entente produce` does it by hand."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.given_parameters import check_given
from flows.run_names import producer_name
from pipeline.cancel_on_sigterm import cancelled_by_sigterm
from pipeline.gathering import PlayedGroups
from pipeline.produce import produce
from pipeline.rollout_side import RolloutSide
from storage.run_roots import RunsFolder
from storage.runs import RunPaths
from tasks.finished_tasks import forget_finished_tasks
from tasks.produced_rollouts import produce_groups
from tasks.quoted import quoted


@flow(name="rollout-producer", flow_run_name=producer_name)
async def produce_rollouts(
    run: str, runs_root: RunsFolder = Path("runs"), urls: tuple[str, ...] = (), producer: str = "", threads: int = 0
) -> dict[str, Any]:
    """Play start groups for `run` until the run ends or dismisses this producer.

    Args:
        run: Name of the run, its folder under `runs_root`.
        runs_root: Folder of all runs, shared with the machine that trains.
        urls: Inference workers (`entente serve`) for this producer alone. Default: those in ENTENTE_PRODUCER_URLS on this
            machine, else those of the run's settings, else an engine in this process.
        producer: Name of the producer; default: host and flow run.
        threads: CPU threads of an engine in this process; 0: as in the run's settings, else all cores.

    Raises:
        InputError: there is no such run, it is not being trained, or this machine lacks its model, players or engine.
    """
    check_given(runs_root, runs=[run], addresses=urls)
    with cancelled_by_sigterm():
        produced = await produce(
            RunPaths(runs_root / run),
            urls=urls,
            producer=producer,
            threads=threads,
            flow_run=str(flow_run.id or ""),
            play=_play,
        )
    return asdict(produced)


async def _play(side: RolloutSide, producer: str, first_group: int, count: int) -> PlayedGroups:
    try:
        return await produce_groups(quoted(side), producer, first_group, count)
    finally:
        forget_finished_tasks()  # else Prefect keeps all rows
