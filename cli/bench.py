"""`entente bench`: measure this machine and compare with targets.

A missed target is not a failure. `bench all --compare` fails if a figure became worse.
"""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter
from rich.console import Console
from rich.table import Table

from cli.bench_dry_run import check_every, check_paper, check_trainer, plannable
from cli.options import AsJson
from cli.settings_from_flags import ConfigFiles
from inference.settings import InferenceSettings

if TYPE_CHECKING:
    from benchmarks.outcome import Outcome

_SCALED_DOWN = "[dim]scaled down, not judged[/]"
_TOOLS = Group("Tune", sort_key=2)  # below the benchmarks
app = App(
    name="bench",
    help="Measure this machine: benchmarks with targets, and the fastest engine settings.",
)
app.command("cli.tune:tune", name="tune", group=_TOOLS)
app.command("cli.bench_e2e:e2e", name="e2e")
app.command("cli.bench_e2e:ablation", name="ablation")
app.command("cli.bench_peers:peers", name="peers")
app.command("cli.bench_growth:growth", name="growth")

Rounds = Annotated[int, Parameter(help="Repetitions of each measurement; the median counts.")]
Seed = Annotated[int, Parameter(help="Seed of the games that are played.")]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")]


@app.command
@plannable("a minute")
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
@plannable("a minute")
def search(
    *,
    positions: Annotated[int, Parameter(help="Spring positions to play out.")] = 12,
    rounds: Rounds = 5,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Playouts of a search: years of DumbBot against DumbBot in a CPU second, compared with forks.

    Example

        entente bench search --json
    """
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.playouts import bench_search

    show_outcome(bench_search(positions=positions, rounds=rounds, seed=seed), json=json)


@app.command
@plannable("a minute")
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
@plannable("a minute")
def prompts(
    *,
    games: Annotated[int, Parameter(help="Games to count over.")] = 12,
    imitate_s: Annotated[float, Parameter(help="CPU seconds of imitation for each of five forms of prompts; 0: none.")] = 0,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Tokens of prompts and completions in every notation, compared with indented JSON, and what imitation learns from them.

    Examples

        entente bench prompts --json

        entente bench prompts --imitate-s 180      half an hour: held-out order loss by form of prompts
    """
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.prompt_tokens import bench_prompts
    from cli.screen import progress_shown

    with progress_shown():
        show_outcome(bench_prompts(games=games, seed=seed, imitate_s=imitate_s), json=json)


@app.command
@plannable("minutes")
def storage(
    *,
    rounds: Annotated[int, Parameter(help="Repetitions of each measurement; the median counts.")] = 15,
    scale: Annotated[
        float, Parameter(help="Share of the rows; below 1 it is quicker, and figures are no longer those that the names say.")
    ] = 1.0,
    seed: Annotated[int, Parameter(help="Seed of the rows.")] = 0,
    json: AsJson = False,
) -> None:
    """The trajectory store: selecting, gathering, publishing and opening, compared with JSON lines and Parquet. Takes minutes.

    Example

        entente bench storage --json
    """
    from benchmarks.storage_figures import bench_storage

    show_outcome(bench_storage(rounds=rounds, scale=scale, seed=seed), json=json)


@app.command
@plannable("twenty minutes, most of them to make a hundred million rows")
def rows(
    *,
    rounds: Annotated[int, Parameter(help="Choices at each size; the median counts.")] = 7,
    quick: Annotated[bool, Parameter(help="At most a million rows: half a minute.", negative="")] = False,
    seed: Annotated[int, Parameter(help="Seed of the rows.")] = 0,
    json: AsJson = False,
) -> None:
    """Whether the index grows with the past: time and memory of a choice among 1e4, 1e6 and 1e8 rows, and what SQL costs.

    Needs 10 GB of disk in the folder for temporary files (TMPDIR); takes about twenty minutes.

    Examples

        entente bench rows --json

        entente bench rows --quick
    """
    from benchmarks.rows import QUICK_SIZES, SIZES, bench_rows
    from cli.screen import progress_shown

    with progress_shown():
        outcome = bench_rows(sizes=QUICK_SIZES if quick else SIZES, rounds=rounds, seed=seed)
    show_outcome(outcome, json=json)


@app.command
@plannable("minutes")
def decode(
    *,
    rounds: Rounds = 5,
    model: Annotated[Path | None, Parameter(help="Folder of a model; default: the tiny one.")] = None,
    runs_root: RunsRoot = Path("runs"),
    http: Annotated[bool, Parameter(help="Also start a worker, for the figures of several workers.")] = True,
    seed: Seed = 0,
    json: AsJson = False,
    settings: Annotated[InferenceSettings | None, Parameter(name="*", help="Any setting of inference.")] = None,
) -> None:
    """The engine: cost of the legal mask, and savings by batches, shared prefixes and slot notation. Takes minutes.

    Example

        entente bench decode --json
    """
    from cli.bench_setting import cache_of, run_settings
    from cli.screen import progress_shown
    from pipeline.run_settings import MODEL_FOLDER
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only: waiting threads use CPU time too
    from benchmarks.decode import bench_decode
    from benchmarks.played_steps import RunInputs
    from state_cache.store import open_cache

    run = run_settings(None, runs_root=runs_root, seed=seed)
    with progress_shown():
        inputs = RunInputs(positions=open_cache(cache_of(run)).train, rollouts=run.rollouts, seed=seed)
        models = runs_root / MODEL_FOLDER
        outcome = bench_decode(rounds=rounds, model=model, models_root=models, inputs=inputs, http=http, settings=settings)
    show_outcome(outcome, json=json)


@app.command
@plannable("minutes", check_trainer)
def trainer(
    *,
    repeats: Annotated[int, Parameter(help="Repetitions of each arm, in turn; the median counts.")] = 5,
    only: Annotated[list[str] | None, Parameter(help="Names of measurements, such as recorded or g6; default: all.")] = None,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    device: Annotated[Literal["cpu", "cuda"], Parameter(help="cuda: the stage of `entente smoke` instead.")] = "cpu",
    seed: Annotated[int, Parameter(help="Seed of the run and of the made-up rows.")] = 0,
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
    from cli.bench_setting import run_settings
    from cli.screen import progress_shown
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.trainer import bench_trainer

    with progress_shown():
        outcome = bench_trainer(
            settings=run_settings(config, runs_root=runs_root.absolute(), seed=seed),
            arguments=[word for file in config or () for word in ("--config", str(file))],
            repeats=repeats,
            only=only or (),
            seed=seed,
        )
    show_outcome(outcome, json=json)


@app.command
@plannable("seven minutes, three of them mostly idle")
def orchestration(
    *,
    tasks: Annotated[int, Parameter(help="Empty tasks per round; 0 skips them.")] = 400,
    rounds: Annotated[int, Parameter(help="Rounds of empty tasks; the median counts.")] = 3,
    steps: Annotated[int, Parameter(help="Steps of the laptop run, and of the run with spare capacity; 0 skips both.")] = 20,
    slow_steps: Annotated[int, Parameter(help="Slow steps; 0 skips them.")] = 2,
    slow_step_s: Annotated[float, Parameter(help="Seconds of a slow step.")] = 60.0,
    json: AsJson = False,
) -> None:
    """Prefect and the flow: cost of a task and of a step, delay of the page, and wait of a trainer that always finds rows.

    Starts a Prefect server and trains five runs, all in a temporary folder; takes about seven minutes, three of them mostly idle.

    Examples

        entente bench orchestration --json

        entente bench orchestration --steps 0              tasks alone, without training
    """
    from benchmarks.orchestration import bench_orchestration
    from cli.screen import progress_shown

    with progress_shown():
        outcome = bench_orchestration(tasks=tasks, rounds=rounds, steps=steps, slow_steps=slow_steps, slow_step_s=slow_step_s)
    show_outcome(outcome, json=json)


@app.command
@plannable("minutes")
def rollout(
    *,
    rounds: Rounds = 5,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Rollouts compared with the previous system: decisions per second, tokens and stages. Takes minutes.

    Examples

        entente bench rollout --json

        entente bench rollout --rounds 1      a minute, once the models are made
    """
    from cli.bench_setting import cache_of, old_way_setting, run_settings
    from cli.screen import progress_shown
    from pipeline.threads import apply_threads

    apply_threads(1)
    from benchmarks.rollout import bench_rollout

    settings = run_settings(config, runs_root=runs_root, seed=seed)
    with progress_shown():
        setting = old_way_setting(settings, cache_of(settings))
        outcome = bench_rollout(rounds=rounds, setting=setting)
    show_outcome(outcome, json=json)


@app.command
@plannable("minutes")
def producers(
    *,
    rounds: Rounds = 5,
    start_groups: Annotated[int, Parameter(help="Start groups that each arm plays in a round.")] = 64,
    cores: Annotated[int, Parameter(help="Threads of the one process, and producers and workers beside it.")] = 2,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Rollouts of a producer and a worker for each core, compared with those of one process on all of them. Takes minutes.

    The machine should have these cores for itself.

    Example

        entente bench producers --json
    """
    from benchmarks.spread import bench_producers
    from cli.bench_setting import cache_of, run_settings
    from cli.screen import progress_shown
    from pipeline.run_settings import MODEL_FOLDER
    from training.tiny_model import make_tiny_model

    settings = run_settings(config, runs_root=runs_root, seed=seed)
    with progress_shown():
        cache_of(settings)
        model = make_tiny_model(runs_root / MODEL_FOLDER, settings.tiny_model, prompts=settings.prompts)
        outcome = bench_producers(settings=settings, model=model, rounds=rounds, start_groups=start_groups, cores=cores)
    show_outcome(outcome, json=json)


@app.command
@plannable("minutes")
def bucket(
    *,
    bucket: Annotated[str, Parameter(help="Folder of runs in an object store; the runs stay there.")] = "s3://bench/runs",
    rounds: Rounds = 3,
    steps: Annotated[int, Parameter(help="Training steps of each run.")] = 12,
    config: ConfigFiles = None,
    runs_root: RunsRoot = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Steps of a run in an object store, compared with those of a run in a local folder. Takes minutes.

    Example

        AWS_ENDPOINT_URL=http://127.0.0.1:8333 entente bench bucket --bucket s3://bench/runs --json
    """
    from benchmarks.bucket import bench_bucket
    from cli.screen import progress_shown
    from storage.run_roots import is_mounted, located
    from telemetry.errors import InputError

    if not is_mounted(there := located(bucket)):
        raise InputError(f"--bucket {bucket} is a folder of this machine: name one in an object store, as s3://bench/runs")
    files = [word for file in config or () for word in ("--config", str(file))]
    arguments = [*files, "--seed", str(seed), "--steps", str(steps), "--evaluation.positions", "2", "--telemetry.no-report"]
    with progress_shown():
        outcome = bench_bucket(arguments, runs_root.resolve(), there, rounds=rounds)
    show_outcome(outcome, json=json)


@app.command
@plannable("a minute", check_paper)
def paper(
    *,
    steps: Annotated[int, Parameter(help="Training steps that are simulated.")] = 8,
    game_processes: Annotated[int, Parameter(help="Processes that play games.")] = 1,
    trainer_cards: Annotated[int, Parameter(help="Cards that share a training step.")] = 1,
    measured: Annotated[
        list[Path] | None,
        Parameter(help="Output of `bench decode`, `trainer` or `orchestration` with --json: its figures replace assumed ones."),
    ] = None,
    json: AsJson = False,
) -> None:
    """A simulation of the pipeline with a GPU's figures: 1, 2, 4, 8 and 64 inference workers, and what limits each.

    It says of each figure that can be measured whether it was. Measured ones must come from one machine.

    Examples

        entente bench paper --json

        entente bench paper --trainer-cards 8 --game-processes 8

        entente bench trainer --only recorded --json > trainer.txt
        entente bench paper --measured trainer.txt
    """
    from benchmarks.measured_figures import read_measured
    from benchmarks.pipeline_on_paper import Hardware, bench_paper
    from cli.screen import progress_shown

    found = read_measured(measured or ())
    with progress_shown():
        hardware = Hardware(game_processes=game_processes, trainer_cards=trainer_cards)
        outcome = bench_paper(hardware=hardware, steps=steps, measured=found)
    show_outcome(outcome, json=json)


@app.command(name="all")
@plannable("a quarter of an hour", check_every)
def every(
    *,
    compare: Annotated[Path | None, Parameter(help="File of earlier figures; exit code 1 if a figure became worse.")] = None,
    out: Annotated[Path | None, Parameter(help="File to store the figures in, for a later comparison.")] = None,
    tolerance: Annotated[float, Parameter(help="Share by which a figure may be worse.")] = 0.25,
    only: Annotated[list[str] | None, Parameter(help="Names of benchmarks; default: all.")] = None,
    config: ConfigFiles = None,
    runs_root: Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")] = Path("runs"),
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
