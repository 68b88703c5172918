"""`entente bench e2e` and `entente bench ablation`: the whole loop beside the previous system, and each improvement alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from cli.bench import Seed, show_outcome
from cli.bench_dry_run import check_ablation, check_e2e, plannable
from cli.options import AsJson
from cli.settings_from_flags import ConfigFiles

if TYPE_CHECKING:
    from pipeline.run_settings import RunSettings

Store = Annotated[
    Path | None,
    Parameter(
        help="File that stores each arm's result, so that an interrupted benchmark can continue. An arm of another commit, other "
        "settings or another machine is measured anew."
    ),
]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")]


@plannable("a quarter of an hour", check_e2e)
def e2e(
    *,
    quick: Annotated[bool, Parameter(help="One short round without scores: two or three minutes.", negative="")] = False,
    years: Annotated[int | None, Parameter(help="Game years of a fork; default: those of the preset, 1.")] = None,
    powers: Annotated[
        Literal["one", "all"] | None, Parameter(help="Powers that the policy plays in a fork; default: that of the preset, one.")
    ] = None,
    start_groups: Annotated[
        int | None, Parameter(help="Start groups of a step; default: those of the preset, 8, or 2 with --years or --powers.")
    ] = None,
    rounds: Annotated[int | None, Parameter(help="Repetitions of both systems, in turn; default 2, or 1 if short.")] = None,
    steps: Annotated[
        int | None,
        Parameter(
            help="Steps of Entente in a round; default 20, or 8 if short. The previous system has the same seconds, but at least "
            "five measured steps, and in the round with scores as many steps."
        ),
    ] = None,
    depth: Annotated[int, Parameter(help="Steps of rollouts that the previous system has in flight while it trains.")] = 2,
    store: Store = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Training from end to end compared with the previous system: steps per hour, and scores after equal time and equal steps.

    Runs `entente train`, and the previous system as its own program. Takes a quarter of an hour. With --quick, --years or
    --powers it is short: one round of 8 steps without scores. If years, powers or start groups differ from the preset's, the
    benchmark's name says so.

    Examples

        entente bench e2e --json --store e2e.json

        entente bench e2e --quick --json

        entente bench e2e --years 4 --powers all --json
    """
    from cli.bench_setting import arguments_of, cache_of, is_short, old_way_setting, rollouts_of, run_settings
    from cli.screen import progress_shown
    from pipeline.run_settings import layered_settings
    from pipeline.threads import apply_threads

    apply_threads(1)
    from benchmarks.end_to_end import bench_e2e, wanted_of
    from benchmarks.kept_arms import KeptArms, conditions_of

    wanted = wanted_of(short=is_short(quick, years, powers), rounds=rounds, steps=steps)
    rollouts = rollouts_of(years, powers, start_groups)
    settings = run_settings(config, runs_root=runs_root, seed=seed, rollouts=rollouts)
    amount = {"steps": wanted.steps, "score": wanted.score, "depth": depth}
    kept = KeptArms(store, conditions_of({**_measured(settings), **amount}))  # a bad file is refused before minutes are spent
    with progress_shown():
        cache = cache_of(settings)
        outcome = bench_e2e(
            wanted=wanted,
            setting=old_way_setting(settings, cache),
            preset=layered_settings("laptop").rollouts,
            cache=cache,
            evaluation=settings.evaluation,
            runs_root=runs_root,
            arguments=arguments_of(config, rollouts),
            depth=depth,
            kept=kept,
        )
    show_outcome(outcome, json=json)


@plannable("forty minutes", check_ablation)
def ablation(
    *,
    only: Annotated[list[str] | None, Parameter(help="Names of improvements, such as packing; default: all.")] = None,
    rounds: Annotated[int, Parameter(help="Rounds in which every arm has its turn; the median counts.")] = 5,
    store: Store = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Each improvement over the previous system alone: on in the previous one, and off in Entente. Takes forty minutes.

    Figures are ratios of CPU seconds on one thread: medians over the rounds, with the least and the greatest value.

    Examples

        entente bench ablation --json --store arms.json

        entente bench ablation --only packing --rounds 1
    """
    from cli.bench_setting import cache_of, old_way_setting, run_settings
    from cli.screen import progress_shown
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.ablation import bench_ablation, check_wanted
    from benchmarks.kept_arms import KeptArms, conditions_of

    check_wanted(only or (), rounds)
    settings = run_settings(config, runs_root=runs_root, seed=seed)
    kept = KeptArms(store, conditions_of(_measured(settings)))
    with progress_shown():
        setting = old_way_setting(settings, cache_of(settings))
        outcome = bench_ablation(only=only or (), rounds=rounds, setting=setting, kept=kept)
    show_outcome(outcome, json=json)


def _measured(settings: "RunSettings") -> dict[str, Any]:
    """Run settings as JSON values, without the names of runs and folders."""
    return settings.model_dump(mode="json", exclude={"run", "runs_root"})
