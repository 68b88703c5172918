"""`--dry-run` of the benchmarks: what would be measured, how often, and about how long; nothing is started or written."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from cli.dry_run import show_plan
from cli.options import DryRun


def plannable(takes: str, check: Callable[[Mapping[str, Any]], None] | None = None) -> Callable[..., Callable[..., None]]:
    """A decorator that gives a benchmark the flag `--dry-run`.

    Args:
        takes: About how long the benchmark takes with its defaults.
        check: Called with the benchmark's arguments by name; raises what the benchmark itself would refuse them with.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        flag = inspect.Parameter("dry_run", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DryRun)

        @wraps(command)
        def run(*, dry_run: bool = False, **given: Any) -> None:
            bound = signature.bind(**given)
            bound.apply_defaults()
            if not dry_run:
                return command(**bound.arguments)
            if bound.arguments.get("config"):
                from pipeline.run_settings import layered_settings

                layered_settings("laptop", bound.arguments["config"])
            if check is not None:
                check(bound.arguments)
            work = {name: _in_words(value) for name, value in bound.arguments.items() if name not in ("json", "settings")}
            about = (inspect.getdoc(command) or "").splitlines()[0]
            plan = {
                "command": f"bench {command.__name__.replace('every', 'all')}",
                "benchmark": {"measures": about},
                "work": work,
                "time": {"with_its_defaults": takes},
            }
            show_plan(plan, json=bound.arguments["json"])

        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])  # type: ignore[attr-defined]
        run.__annotations__ = command.__annotations__ | {"dry_run": DryRun}
        return run

    return decorate


def check_paper(given: Mapping[str, Any]) -> None:
    """Refuse files of figures as `entente bench paper` would."""
    from benchmarks.measured_figures import read_measured

    read_measured(given["measured"] or ())


def check_every(given: Mapping[str, Any]) -> None:
    """Refuse names and files as `entente bench all` would."""
    from benchmarks.compare import check_names, read_outcomes

    check_names(given["only"] or ())
    if given["compare"] is not None:
        read_outcomes(given["compare"])


def check_trainer(given: Mapping[str, Any]) -> None:
    """Refuse names, and a model that has no recorded rows, as `entente bench trainer` would."""
    if given["device"] == "cpu":
        from benchmarks.trainer import check_wanted
        from cli.bench_setting import run_settings

        settings = run_settings(given["config"], runs_root=given["runs_root"], seed=given["seed"])
        check_wanted(given["only"] or (), given["repeats"], settings.inference.model)


def check_e2e(given: Mapping[str, Any]) -> None:
    """Refuse rounds, steps, years, powers and start groups as `entente bench e2e` would."""
    from benchmarks.end_to_end import wanted_of
    from cli.bench_setting import is_short, rollouts_of, run_settings

    short = is_short(given["quick"], given["years"], given["powers"])
    wanted_of(short=short, rounds=given["rounds"], steps=given["steps"])
    rollouts = rollouts_of(given["years"], given["powers"], given["start_groups"])
    run_settings(given["config"], runs_root=given["runs_root"], seed=given["seed"], rollouts=rollouts)


def check_ablation(given: Mapping[str, Any]) -> None:
    """Refuse names and numbers as `entente bench ablation` would."""
    from benchmarks.ablation import check_wanted

    check_wanted(given["only"] or (), given["rounds"])


def check_peers(given: Mapping[str, Any]) -> None:
    """Refuse names and numbers as `entente bench peers` would."""
    from benchmarks.peers.bench import check_wanted

    check_wanted(given["only"] or (), given["rounds"])


def check_growth(given: Mapping[str, Any]) -> None:
    """Refuse names and the file of the plot, as `entente bench growth` would."""
    from benchmarks.growth.bench import check_wanted

    check_wanted(given["only"] or ())
    if given["plot"] is not None:
        from reports.growth_plot import check_plot

        check_plot(given["plot"])


def _in_words(value: Any) -> Any:
    """A figure as it is, anything else as text."""
    if value is None:
        return "the default"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
