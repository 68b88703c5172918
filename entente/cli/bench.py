"""`entente bench`: measure this machine and compare with targets.

A missed target is not a failure.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from entente.cli.options import AT_LEAST_1, SEED, AsJson, ConfigFiles
from entente.decoding.model_files import resolve_model
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from entente.telemetry.machine import apply_threads

if TYPE_CHECKING:
    from benchmarks.outcome import Outcome

app = App(name="bench", help="Benchmark this machine against targets, and find the fastest engine settings.")
app.command("entente.cli.tune:tune", name="tune")


@app.default
def bench(
    what: Annotated[
        Literal["game", "storage", "decode", "trainer", "e2e", "peers"],
        Parameter(
            help="game: the board, compared with direct calls of the game engine. storage: writing and "
            "reading rows. decode: the engine. trainer: the training step. e2e: full steps of a run. peers: comparison with TRL."
        ),
    ],
    /,
    *,
    rounds: Annotated[
        int | None, Parameter(help="Repetitions of each measurement, alternating; the median is reported.", validator=AT_LEAST_1)
    ] = None,
    only: Annotated[list[str] | None, Parameter(help="trainer: run only these measurements, such as 'recorded'.")] = None,
    steps: Annotated[int | None, Parameter(help="e2e: steps per round.", validator=AT_LEAST_1)] = None,
    scale: Annotated[float | None, Parameter(help="storage: fraction of the rows; below 1, few results have targets.")] = None,
    model: Annotated[Path | None, Parameter(help="decode, trainer, peers: folder of a model; default: tiny ones.")] = None,
    trl_python: Annotated[Path | None, Parameter(help="peers: Python of an environment that has TRL.")] = None,
    config: ConfigFiles = None,
    runs_root: Annotated[
        Path | None,
        Parameter(help="Folder of runs, models and positions, of which missing ones are made; default: that of the settings."),
    ] = None,
    seed: Annotated[int | None, Parameter(help="Seed of games, rows and runs.", validator=SEED)] = None,
    json: AsJson = False,
) -> None:
    """Benchmark one part of the system; takes minutes at most.

    Examples

        entente bench game --json

        entente bench trainer --only recorded --only g6 --rounds 3

        entente bench e2e --rounds 1 --steps 8 --config four-years.toml
    """
    from entente.cli.terminal import show_progress

    options = {
        "rounds": rounds, "only": only, "steps": steps, "scale": scale, "model": model, "trl_python": trl_python,
        "config": config, "runs_root": runs_root, "seed": seed,
    }  # fmt: skip
    measure, options = _BENCHMARKS[what], {name: value for name, value in options.items() if value is not None}
    if others := sorted(options.keys() - inspect.signature(measure).parameters):
        raise InputError(f"`bench {what}` has no use for --{others[0].replace('_', '-')}: leave it out")
    with show_progress():
        outcome = measure(**options)
    show_outcome(outcome, json=json)


def _game(rounds: int = 5, seed: int = 0) -> "Outcome":
    from benchmarks.game_ground import bench_game

    return bench_game(rounds=rounds, seed=seed)


def _storage(rounds: int = 15, scale: float = 1.0, seed: int = 0) -> "Outcome":
    from benchmarks.storage_figures import bench_storage

    return bench_storage(rounds=rounds, scale=scale, seed=seed)


def _decode(rounds: int = 5, model: Path | None = None, runs_root: Path | None = None, seed: int | None = None) -> "Outcome":
    run = _settings((), runs_root, seed)
    from benchmarks.decode import bench_decode
    from benchmarks.decode_cases import RunInputs
    from benchmarks.laptop_run import cache_of, model_of

    inputs = RunInputs(positions=cache_of(run).train, rollouts=run.rollouts, seed=run.seed)
    return bench_decode(rounds=rounds, model=resolve_model(model) if model else model_of(run), inputs=inputs)


def _trainer(
    rounds: int = 5,
    only: Sequence[str] = (),
    model: Path | None = None,
    config: Sequence[Path] = (),
    runs_root: Path | None = None,
    seed: int | None = None,
) -> "Outcome":
    settings = _settings(config, runs_root, seed)
    from benchmarks.trainer import bench_trainer

    folder = resolve_model(model) if model else None
    words = _config_words(config)
    return bench_trainer(settings=settings, arguments=words, repeats=rounds, only=only, seed=settings.seed, model=folder)


def _e2e(
    rounds: int = 2, steps: int = 20, config: Sequence[Path] = (), runs_root: Path | None = None, seed: int | None = None
) -> "Outcome":
    settings = _settings(config, runs_root, seed)
    from benchmarks.entente_run import bench_e2e

    return bench_e2e(settings, rounds=rounds, steps=steps, arguments=_config_words(config))


def _peers(
    rounds: int = 5,
    trl_python: Path = Path(".venv-trl/bin/python"),
    model: Path | None = None,
    config: Sequence[Path] = (),
    runs_root: Path | None = None,
    seed: int | None = None,
) -> "Outcome":
    preset = "lm" if model else "laptop"
    settings, words = _settings(config, runs_root, seed, preset), ["--preset", preset, *_config_words(config)]
    if model:
        settings = settings.model_copy(update={"inference": settings.inference.model_copy(update={"model": str(model)})})
        words += ["--inference.model", str(model)]
    from benchmarks.peers.bench import bench_peers

    return bench_peers(settings, words, trl_python.absolute(), rounds=rounds)


_BENCHMARKS: dict[str, Callable[..., "Outcome"]] = {
    "game": _game,
    "storage": _storage,
    "decode": _decode,
    "trainer": _trainer,
    "e2e": _e2e,
    "peers": _peers,
}


def _settings(config: Sequence[Path], runs_root: Path | None, seed: int | None, preset: str = "laptop") -> Any:
    """One thread, set before torch is imported: CPU seconds are comparable for one thread only."""
    apply_threads(1)
    flags = {name: value for name, value in (("seed", seed), ("runs_root", runs_root)) if value is not None}
    settings = layered_settings(preset, config, flags)
    return settings.model_copy(update={"runs_root": settings.runs_root.absolute()})


def _config_words(config: Sequence[Path]) -> list[str]:
    return [word for file in config for word in ("--config", str(file))]


def show_outcome(outcome: "Outcome", *, json: bool) -> None:
    from entente.cli.terminal import print_json

    table = Table(box=None, padding=(0, 2, 0, 0))
    name, _, settings = outcome.benchmark.partition(", ")
    if settings:
        Console().print(f"bench {name} with {settings}", soft_wrap=True, highlight=False)
    table.add_column(f"bench {name}", no_wrap=True)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, value in outcome.metrics.items():
        target = outcome.targets.get(name)
        bounds = ", ".join(f"{word.replace('_', ' ')} {bound:,g}" for word, bound in target.as_object().items()) if target else ""
        verdict = "" if target is None else "[green]holds[/]" if target.holds(value) else "[yellow]missed[/]"
        table.add_row(name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}", bounds, verdict)
    Console().print(table)
    if json:
        print_json(outcome.as_object())
