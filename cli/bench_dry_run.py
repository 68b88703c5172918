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


def check_every(given: Mapping[str, Any]) -> None:
    """Refuse names and files as `entente bench all` would."""
    from benchmarks.compare import check_names, read_outcomes

    check_names(given["only"] or ())
    if given["compare"] is not None:
        read_outcomes(given["compare"])


def check_trainer(given: Mapping[str, Any]) -> None:
    """Refuse names as `entente bench trainer` would."""
    if given["device"] == "cpu":
        from benchmarks.trainer import check_wanted

        check_wanted(given["only"] or (), given["repeats"])


def check_peers(given: Mapping[str, Any]) -> None:
    """Refuse names and numbers as `entente bench peers` would."""
    from benchmarks.peers.bench import check_wanted

    check_wanted(given["only"] or (), given["rounds"])


def _in_words(value: Any) -> Any:
    """A figure as it is, anything else as text."""
    if value is None:
        return "the default"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
