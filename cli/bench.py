"""`entente bench`: measure this machine and compare with targets.

A missed target is not a failure.
"""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter
from rich.console import Console
from rich.table import Table

from cli.options import AsJson
from cli.settings_from_flags import ConfigFiles
from inference.settings import InferenceSettings

if TYPE_CHECKING:
    from benchmarks.outcome import Outcome

app = App(name="bench", help="Measure this machine: benchmarks with targets, and the fastest engine settings.")
app.command("cli.tune:tune", name="tune", group=Group("Tune", sort_key=2))  # below the benchmarks

Rounds = Annotated[int, Parameter(help="Repetitions of each measurement; the median counts.")]
Seed = Annotated[int, Parameter(help="Seed of games, rows and runs.")]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")]


@app.command
def game(
    *,
    phases: Annotated[int, Parameter(help="Least number of phases to play.")] = 600,
    rounds: Rounds = 5,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """The board: phases per second compared with direct calls of the game engine, and the cost of a fork and of a restore.

    Example

        entente bench game --json
    """
    from benchmarks.game_ground import bench_game

    show_outcome(bench_game(phases=phases, rounds=rounds, seed=seed), json=json)


@app.command
def cache(
    *,
    positions: Annotated[int, Parameter(help="Positions to freeze; times are given per 1,000.")] = 1000,
    rounds: Rounds = 5,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """The state cache: cost of building and reading 1,000 positions, and their size.

    Example

        entente bench cache --json
    """
    from benchmarks.cache_shelf import bench_cache

    show_outcome(bench_cache(positions=positions, rounds=rounds, seed=seed), json=json)


@app.command
def storage(
    *,
    rounds: Rounds = 15,
    scale: Annotated[
        float, Parameter(help="Share of the rows; below 1 it is quicker, and figures are no longer those that the names say.")
    ] = 1.0,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """The trajectory store: selecting, gathering, opening and recording rows. Takes minutes.

    Example

        entente bench storage --json
    """
    from benchmarks.storage_figures import bench_storage

    show_outcome(bench_storage(rounds=rounds, scale=scale, seed=seed), json=json)


@app.command
def decode(
    *,
    rounds: Rounds = 5,
    model: Annotated[Path | None, Parameter(help="Folder of a model; default: the tiny one.")] = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
    settings: Annotated[InferenceSettings | None, Parameter(name="*", help="Any setting of inference.")] = None,
) -> None:
    """The engine: cost of legal tables and of a new version, savings by batches and shared prefixes. Takes minutes.

    Example

        entente bench decode --json
    """
    _one_thread()
    from benchmarks.decode import bench_decode
    from benchmarks.laptop_run import cache_of, run_settings
    from benchmarks.played_steps import RunInputs
    from cli.screen import progress_shown
    from decoding.model_files import resolve_model
    from state_cache.store import open_cache
    from storage.runs import MODEL_FOLDER
    from training.tiny_model import make_tiny_model

    run = run_settings(None, runs_root=runs_root, seed=seed)
    with progress_shown():
        folder = resolve_model(model) if model else make_tiny_model(runs_root / MODEL_FOLDER, run.tiny_model)
        inputs = RunInputs(positions=open_cache(cache_of(run)).train, rollouts=run.rollouts, seed=seed)
        outcome = bench_decode(rounds=rounds, model=folder, inputs=inputs, settings=settings)
    show_outcome(outcome, json=json)


@app.command
def trainer(
    *,
    repeats: Annotated[int, Parameter(help="Repetitions of each arm, in turn; the median counts.")] = 5,
    only: Annotated[list[str] | None, Parameter(help="Names of measurements, such as recorded or g6; default: all.")] = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    device: Annotated[Literal["cpu", "cuda"], Parameter(help="cuda: the stage of `entente smoke` instead.")] = "cpu",
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """The training step compared with the old trainer, on rows of a laptop run and on made-up ones. Takes minutes.

    Examples

        entente bench trainer --json

        entente bench trainer --only recorded --only g6 --repeats 3
    """
    if device == "cuda":
        from cli.smoke import smoke

        return smoke(device="cuda", only=["training-step"], json=json)
    _one_thread()
    from benchmarks.laptop_run import run_settings
    from benchmarks.trainer import bench_trainer
    from cli.screen import progress_shown

    settings = run_settings(config, runs_root=runs_root.absolute(), seed=seed)
    with progress_shown():
        outcome = bench_trainer(settings=settings, arguments=_config_words(config), repeats=repeats, only=only or (), seed=seed)
    show_outcome(outcome, json=json)


@app.command
def orchestration(
    *,
    tasks: Annotated[int, Parameter(help="Empty tasks per round.")] = 400,
    rounds: Rounds = 3,
    json: AsJson = False,
) -> None:
    """Prefect: cost of a task for client and server, and delay of the page. Starts a server in a temporary folder.

    Example

        entente bench orchestration --json
    """
    from benchmarks.orchestration import bench_orchestration
    from cli.screen import progress_shown

    with progress_shown():
        outcome = bench_orchestration(tasks=tasks, rounds=rounds)
    show_outcome(outcome, json=json)


@app.command
def rollout(
    *,
    rounds: Rounds = 5,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Rollouts compared with the previous system: decisions per second, and tokens. Takes minutes.

    Examples

        entente bench rollout --json

        entente bench rollout --rounds 1      a minute, once the models are made
    """
    _one_thread()
    from benchmarks.laptop_run import run_settings
    from benchmarks.rollout import bench_rollout
    from cli.screen import progress_shown

    with progress_shown():
        outcome = bench_rollout(run_settings(config, runs_root=runs_root, seed=seed), rounds=rounds)
    show_outcome(outcome, json=json)


@app.command
def e2e(
    *,
    rounds: Annotated[int, Parameter(help="Repetitions of both systems, in turn.")] = 2,
    steps: Annotated[
        int,
        Parameter(help="Steps of Entente in a round. The previous system has as many seconds, and at least six steps."),
    ] = 20,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Training from end to end compared with the previous system: steps per hour.

    Runs `entente train`, and the previous system as its own program. Takes some minutes. If the settings of rollouts differ from
    the laptop preset's, the benchmark's name says so, and no target is judged.

    Examples

        entente bench e2e --json

        entente bench e2e --rounds 1 --steps 8 --config four-years.toml
    """
    _one_thread()
    from benchmarks.end_to_end import bench_e2e
    from benchmarks.laptop_run import run_settings
    from cli.screen import progress_shown

    settings = run_settings(config, runs_root=runs_root, seed=seed)
    with progress_shown():
        outcome = bench_e2e(settings, rounds=rounds, steps=steps, arguments=_config_words(config))
    show_outcome(outcome, json=json)


@app.command
def peers(
    *,
    only: Annotated[list[str] | None, Parameter(help="Names of figures, such as trl_step; default: all.")] = None,
    rounds: Rounds = 5,
    trl_python: Annotated[Path, Parameter(help="Python of an environment that has TRL.")] = Path(".venv-trl/bin/python"),
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Installed peers over ours: TRL's training step, and XGrammar's mask. Takes minutes.

    Examples

        entente bench peers --json

        entente bench peers --only xgrammar_mask
    """
    _one_thread()
    from benchmarks.laptop_run import run_settings
    from benchmarks.peers.bench import bench_peers
    from cli.screen import progress_shown

    settings, python = run_settings(config, runs_root=runs_root.absolute(), seed=seed), trl_python.absolute()
    with progress_shown():
        outcome = bench_peers(settings, _config_words(config), python, only=only or (), rounds=rounds)
    show_outcome(outcome, json=json)


def show_outcome(outcome: "Outcome", *, json: bool) -> None:
    """Print the figures with their targets; with `json` one object as the last line."""
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
        print(jsonlib.dumps(outcome.as_object()))


def _one_thread() -> None:
    """Limit this process to one thread, before torch is imported: CPU seconds are comparable for one thread only."""
    from pipeline.threads import apply_threads

    apply_threads(1)


def _config_words(config: ConfigFiles) -> list[str]:
    """Arguments of `entente train` for these config files."""
    return [word for file in config or () for word in ("--config", str(file))]
