"""`entente produce`: play rollouts for a run that trains elsewhere, here or on a Dask cluster."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from cli.dry_run import show_plan
from cli.options import AsJson, DryRun, Run, RunsRoot, which_run
from cli.run_flow import run_flow
from cli.screen import progress_shown
from storage.runs import LATEST, RunPaths


def produce(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    urls: Annotated[
        list[str] | None,
        Parameter(help="Inference workers; default: those in ENTENTE_PRODUCER_URLS, those of the run, or an engine here."),
    ] = None,
    name: Annotated[str, Parameter(help="Name of the producer, one for each; default: this host and process.")] = "",
    threads: Annotated[
        int, Parameter(help="CPU threads of an engine here; 0: as in the run, or all cores.", validator=validators.Number(gte=0))
    ] = 0,
    dask: Annotated[str, Parameter(help="Address of a Dask scheduler: a producer in each worker process of its cluster.")] = "",
    json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Play rollouts for a run that trains elsewhere, until the run ends; as many of these as you like, on as many machines.

    Needs the folder of runs, and neither Prefect nor a trainer. The run decides how much is played; it must not be deterministic
    or in lockstep. SIGTERM or Ctrl-C ends it at any time: what it has played is published first. A producer that is started again
    under its name continues with its numbers.

    Examples

        entente produce --run mine                               with an engine in this process

        entente produce --run mine --urls http://gpu-1:8100 --urls http://gpu-2:8100

        entente produce --run mine --name rack-7 --threads 4     a name of your own

        entente produce --run mine --dask tcp://10.0.0.5:8786    one in each worker process of a cluster

        entente train --run mine --pipeline.no-deterministic --pipeline.task-runner producers    a flow that only trains
    """
    from pipeline.produce import check_produce, urls_here
    from pipeline.produce import produce as produce_rollouts
    from pipeline.producer_desk import own_name
    from pipeline.rollout_side import model_of_side

    paths = RunPaths(runs_root / which_run(run, runs_root))
    if dry_run:
        settings, control = check_produce(paths, name or own_name())
        plan = {
            "command": "produce",
            "run": {"name": settings.run, "trains_on": control.host, "version": control.version},
            "producer": {"name": name or own_name(), "dask": dask or "none"},
            "engine": {
                "model": str(model_of_side(paths, settings, control)),
                "workers": ", ".join(urls or urls_here() or settings.inference.urls) or "none: an engine in this process",
            },
        }
        return show_plan(plan, json=json)
    with progress_shown():
        if dask:
            check_produce(paths, name or own_name())
            from tasks.dask_producers import produce_on_dask

            ended = run_flow(produce_on_dask(dask, paths, prefix=name, urls=urls or (), threads=threads))
        else:
            ended = [run_flow(produce_rollouts(paths, urls=urls or (), producer=name, threads=threads))]
    for each in ended:
        print(f"producer '{each.producer}' published {each.start_groups} start groups, {each.decisions} decisions; {each.why}")
    if json:
        print(jsonlib.dumps([asdict(each) for each in ended]))
