"""`entente evaluate`: the strength of a policy version."""

import asyncio
import json as jsonlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli.dry_run import DryRun, show_plan


def evaluate(
    *,
    run: Annotated[str, Parameter(help="Name of the run.")],
    version: Annotated[int, Parameter(help="Policy version; 0 is the base, -1 the newest.")] = -1,
    runs_root: Annotated[Path, Parameter(help="Folder of all runs.")] = Path("runs"),
    positions: Annotated[int | None, Parameter(help="Held-out positions; default: as the run was set.")] = None,
    opponents: Annotated[
        list[str] | None, Parameter(help="Scripted opponents; default: as the run was set.", negative="")
    ] = None,
    json: Annotated[bool, Parameter(help="Print the result as one JSON object, last line.", negative="")] = False,
    dry_run: DryRun = False,
) -> None:
    """Score a policy version on held-out positions against scripted opponents, with 95 % intervals.

    Examples

        entente evaluate --run mine

        entente evaluate --run mine --version 0 --opponents random --json
    """
    from flows.run_settings import check_settings, settings_of
    from storage.runs import RunPaths

    settings = settings_of(RunPaths(runs_root / run))
    wished: dict[str, object] = {}
    if positions is not None:
        wished["positions"] = positions
    if opponents is not None:
        wished["opponents"] = tuple(opponents)
    evaluation = type(settings.evaluation).model_validate(settings.evaluation.model_dump() | wished)
    settings = settings.model_copy(update={"evaluation": evaluation})
    check_settings(settings)
    from flows.find_model import check_room
    from flows.plan_run import plan_evaluate

    if dry_run:
        return show_plan(plan_evaluate(run, version, runs_root, settings), json=json)
    check_room(settings, trains=False)
    from cli.prefect_server import prefect_server
    from cli.screen import progress_shown
    from flows.evaluate_policy import evaluate_policy

    with prefect_server(), progress_shown():
        result = asyncio.run(evaluate_policy(run, version, runs_root, evaluation))
    for name, score in result["against"].items():
        low, high = score["ci"]
        print(
            f"policy version {result['policy_version']} against {name}: {score['score']:+.2f} centres, "
            f"95 % interval [{low:+.2f}, {high:+.2f}] over {score['forks']} forks"
        )
    if json:
        print(jsonlib.dumps(result))
