"""`entente bench`: measure this machine and compare with targets.

A missed target is not a failure. `bench all --compare` fails if a figure became worse.
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

_SCALED_DOWN = "[dim]scaled down, not judged[/]"
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
    """The trajectory store: selecting, gathering, publishing and opening, compared with JSON lines and Parquet. Takes minutes.

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
    """The engine: cost of the legal mask, and savings by batches, shared prefixes and slot notation. Takes minutes.

    Example

        entente bench decode --json
    """
    _one_thread()
    from benchmarks.decode import bench_decode
    from benchmarks.laptop_run import cache_of, run_settings
    from benchmarks.played_steps import RunInputs
    from cli.screen import progress_shown
    from state_cache.store import open_cache
    from storage.runs import MODEL_FOLDER

    run = run_settings(None, runs_root=runs_root, seed=seed)
    with progress_shown():
        inputs = RunInputs(positions=open_cache(cache_of(run)).train, rollouts=run.rollouts, seed=seed)
        models = runs_root / MODEL_FOLDER
        outcome = bench_decode(rounds=rounds, model=model, models_root=models, inputs=inputs, settings=settings)
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
    steps: Annotated[int, Parameter(help="Steps of a laptop run on the same server; 0: tasks alone.")] = 20,
    json: AsJson = False,
) -> None:
    """Prefect and the flow: cost of a task, delay of the page, and Prefect's share of a step. Takes some minutes.

    Starts a Prefect server and trains runs, all in a temporary folder.

    Examples

        entente bench orchestration --json

        entente bench orchestration --steps 0              tasks alone, without training
    """
    from benchmarks.orchestration import bench_orchestration
    from cli.screen import progress_shown

    with progress_shown():
        outcome = bench_orchestration(tasks=tasks, rounds=rounds, steps=steps)
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
    quick: Annotated[bool, Parameter(help="One round of 8 steps without scores: two or three minutes.", negative="")] = False,
    rounds: Annotated[int | None, Parameter(help="Repetitions of both systems, in turn; default 2, or 1 if quick.")] = None,
    steps: Annotated[
        int | None,
        Parameter(
            help="Steps of Entente in a round; default 20, or 8 if quick. The previous system has the same seconds, but at least "
            "five measured steps, and in the round with scores as many steps."
        ),
    ] = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Training from end to end compared with the previous system: steps per hour, and scores after equal time and equal steps.

    Runs `entente train`, and the previous system as its own program. Takes a quarter of an hour. If the settings of rollouts
    differ from the laptop preset's, the benchmark's name says so, and no target is judged.

    Examples

        entente bench e2e --json

        entente bench e2e --quick --json

        entente bench e2e --quick --config four-years.toml
    """
    _one_thread()
    from benchmarks.end_to_end import bench_e2e, wanted_of
    from benchmarks.laptop_run import run_settings
    from cli.screen import progress_shown

    wanted = wanted_of(short=quick, rounds=rounds, steps=steps)
    settings = run_settings(config, runs_root=runs_root, seed=seed)
    with progress_shown():
        outcome = bench_e2e(settings, wanted=wanted, arguments=_config_words(config))
    show_outcome(outcome, json=json)


@app.command
def peers(
    *,
    only: Annotated[list[str] | None, Parameter(help="Names of figures, such as trl_step; default: all.")] = None,
    rounds: Rounds = 5,
    quick: Annotated[
        bool, Parameter(help="One small round without scores; its figures only show that it works.", negative="")
    ] = False,
    install: Annotated[
        bool, Parameter(help="Install the peers that have an environment of their own, instead of measuring.", negative="")
    ] = False,
    environments: Annotated[
        Path | None, Parameter(help="Folder of the peers' environments; default: entente/peers in the user's cache.")
    ] = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Installed peers over ours: TRL's step, TRL whole, and masks by XGrammar and llguidance. Takes half an hour.

    Examples

        entente bench peers --install

        entente bench peers --json

        entente bench peers --only xgrammar_mask --quick
    """
    from benchmarks.peers.bench import check_wanted
    from benchmarks.peers.environments import default_folder
    from benchmarks.peers.environments import install as install_peers
    from cli.screen import progress_shown

    folder = (environments or default_folder()).absolute()
    wanted = check_wanted(only or (), rounds)
    if install:
        with progress_shown():
            made = install_peers(wanted, folder)
        what = f"installed: {', '.join(map(str, made))}" if made else f"all peers are installed in {folder}"
        Console().print(what, markup=False, soft_wrap=True)
        return
    _one_thread()
    from benchmarks.laptop_run import run_settings
    from benchmarks.peers.bench import Inputs, bench_peers

    settings = run_settings(config, runs_root=runs_root.absolute(), seed=seed)
    inputs = Inputs(settings=settings, arguments=_config_words(config), environments=folder)
    with progress_shown():
        outcome = bench_peers(inputs, only=wanted, rounds=rounds, quick=quick)
    for sentence in outcome.left_out.values():
        Console(stderr=True).print(sentence, markup=False, soft_wrap=True)
    show_outcome(outcome, json=json)


@app.command(name="all")
def every(
    *,
    compare: Annotated[Path | None, Parameter(help="File of earlier figures; exit code 1 if a figure became worse.")] = None,
    out: Annotated[Path | None, Parameter(help="File to store the figures in, for a later comparison.")] = None,
    tolerance: Annotated[float, Parameter(help="Share by which a figure may be worse.")] = 0.25,
    only: Annotated[list[str] | None, Parameter(help="Names of benchmarks; default: all.")] = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Run every benchmark in its quick form, and compare with stored figures. Takes a quarter of an hour.

    Examples

        entente bench all --out then.json

        entente bench all --compare then.json --only rollout --only trainer
    """
    from benchmarks.compare import compare as compared
    from benchmarks.compare import read_outcomes, run_all, write_outcomes
    from cli.screen import progress_shown

    before = read_outcomes(compare) if compare is not None else {}  # a bad file is refused before minutes are spent
    with progress_shown():
        found = run_all(only or (), runs_root=runs_root, config=config or ())
    lines = compared(before, found, tolerance=tolerance)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("benchmark", "figure", "before", "now", "ratio", ""):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("benchmark", "figure", "") else "right")
    for line in lines:
        if line.judged or line.scaled_down or compare is None:
            verdict = "[yellow]worse[/]" if line.worse else "[green]holds[/]" if line.judged else ""
            verdict = _SCALED_DOWN if line.scaled_down else verdict
            numbers = ["" if value is None else f"{value:,.4g}" for value in (line.before, line.now, line.ratio)]
            table.add_row(line.benchmark, line.figure, *numbers, verdict)
    Console().print(table)
    if out is not None:
        write_outcomes(out, found)
    failed = sorted(name for name, outcome in found.items() if "error" in outcome)
    worse = [line for line in lines if line.worse]
    for name in failed:
        Console(stderr=True).print(f"bench {name} failed: {found[name]['error']}", markup=False)
    if json:
        print(jsonlib.dumps({"benchmarks": found, "worse": [f"{line.benchmark}.{line.figure}" for line in worse]}))
    if worse or failed:
        raise SystemExit(1)


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
        verdict = _SCALED_DOWN if target and name in outcome.scaled_down else verdict
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
