"""`entente improve`: rounds of distilling search into a run's policy."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from entente.cli.options import AsJson, Run, RunsRoot, which_run
from entente.cli.run_flow import run_flow
from entente.cli.terminal import print_json
from entente.rollouts.improve_rounds import ImproveSettings, check_improve, open_rounds
from storage.runs import LATEST, RunPaths

_Flags = Annotated[ImproveSettings | None, Parameter(name="*")]


def improve(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
    settings: _Flags = None,
) -> None:
    """Improve a run's policy by search: roll it out, label positions that it reaches by search, train on the labels; repeat.

    The run must exist (`entente train`) and must not be training. Each step publishes a version, as in training. After
    each round the policy is scored with the run's `evaluation` settings. After a crash, run the same command again to continue
    from the run's files. `--rounds` counts all rounds of the run.

    Examples

        entente improve --run mine

        entente improve --run mine --rounds 2 --positions 500 --search.playouts 32

        entente improve --run mine --search.scripted dumbbot,dumbbot --temperature 0

        entente improve --run mine --rollouts                with new start groups in each step
    """
    from entente.settings.layers import settings_of

    run, settings = which_run(run, runs_root), settings or ImproveSettings()
    paths = RunPaths(runs_root / run)
    stored = settings_of(paths).model_copy(update={"runs_root": runs_root})
    check_improve(settings, stored.prompts.thinking_tokens)
    left = open_rounds(paths, settings)
    from flows.improve_policy import improve_policy, with_steps
    from flows.open_run import check_inputs

    if left:
        check_inputs(with_steps(stored), resume=True)
    result = run_flow(lambda: improve_policy(run, runs_root, settings))
    for each in result["rounds"]:
        loss = f", distillation loss {each['train/distil_loss']:.3f} nats a token" if "train/distil_loss" in each else ""
        score = f", {each['score/eval']:+.2f} centres" if "score/eval" in each else ""
        print(
            f"round {each['round']}: {each['distil_targets']} distillation targets, then version {each['version']}{loss}{score}"
        )
    print(f"measure its strength: entente evaluate --run {run}{'' if runs_root == Path('runs') else f' --runs-root {runs_root}'}")
    if json:
        print_json(result)
