"""`entente bench peers`: measure against installed peers, or install them."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from cli.bench import Rounds, Seed, show_outcome
from cli.bench_dry_run import check_peers, plannable
from cli.options import AsJson
from cli.settings_from_flags import ConfigFiles


@plannable("half an hour", check_peers)
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
    runs_root: Annotated[Path, Parameter(help="Folder of all runs; models and positions lie there, or are made.")] = Path("runs"),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Installed peers over ours: TRL, XGrammar, llguidance, vLLM's structured outputs, Lance, Parquet. Takes half an hour.

    Examples

        entente bench peers --install

        entente bench peers --json

        entente bench peers --only xgrammar_mask --only parquet_gather --quick
    """
    from benchmarks.peers.bench import check_wanted
    from benchmarks.peers.environments import default_folder
    from cli.screen import progress_shown

    folder = (environments or default_folder()).absolute()
    wanted = check_wanted(only or (), rounds)
    if install:
        from benchmarks.peers.environments import install as install_peers

        with progress_shown():
            made = install_peers(wanted, folder)
        what = f"installed: {', '.join(map(str, made))}" if made else f"all peers are installed in {folder}"
        Console().print(what, markup=False, soft_wrap=True)
        return
    from cli.bench_setting import cache_of, run_settings
    from pipeline.threads import apply_threads

    apply_threads(1)  # CPU seconds are comparable for one thread only
    from benchmarks.peers.bench import Inputs, bench_peers

    settings = run_settings(config, runs_root=runs_root.absolute(), seed=seed)
    inputs = Inputs(
        settings=settings,
        arguments=[word for file in config or () for word in ("--config", str(file))],
        cache=lambda: cache_of(settings),
        environments=folder,
    )
    with progress_shown():
        outcome = bench_peers(inputs, only=wanted, rounds=rounds, quick=quick)
    for sentence in outcome.left_out.values():
        Console(stderr=True).print(sentence, markup=False, soft_wrap=True)
    show_outcome(outcome, json=json)
