"""`entente cache`: build, refresh, show and verify state caches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.table import Table

from entente.cli.options import which_run
from entente.cli.run_flow import run_flow
from entente.telemetry.errors import DataError, InputError
from state_cache.sampling import BALANCES, count_strata
from state_cache.settings import CacheSettings
from storage.runs import CACHE_FOLDER

if TYPE_CHECKING:
    from entente.game.snapshot import Snapshot

app = App(name="cache", help="Frozen mid-game positions that rollouts start from.")

RunsRoot = Annotated[Path, Parameter(help="Folder of runs and caches.")]
CacheFlags = Annotated[CacheSettings | None, Parameter(name="*", help="Any cache setting.")]

_SHARE = validators.Number(gt=0, lt=1)
_PHASE_WORDS = {"M": "movement", "R": "retreats", "A": "adjustments"}


@app.command
def build(
    *,
    runs_root: RunsRoot = Path("runs"),
    settings: CacheFlags = None,
) -> None:
    """Play scripted games and save positions. A cache with the same settings is built only once.

    Examples

        entente cache build

        entente cache build --train-snapshots 2000 --last-year 1910 --seed 3
    """
    from flows.build_state_cache import build_state_cache

    chosen = CacheSettings() if settings is None else CacheSettings.model_validate(settings.model_dump(exclude_unset=True))
    path = run_flow(lambda: build_state_cache(chosen, runs_root))
    assert path is not None, "no run was named"
    print(path)


@app.command
def refresh(
    *,
    run: Annotated[str, Parameter(help="Run whose cache is refreshed with positions that its rollouts reached.")],
    share: Annotated[float, Parameter(help="Share of the training positions that come from the run.", validator=_SHARE)] = 0.25,
    runs_root: RunsRoot = Path("runs"),
) -> None:
    """Publish a new version of a run's cache, with positions that its policy reached.

    Held-out positions stay the same; cache versions that are in use are kept.

    Examples

        entente cache refresh --run mine --share 0.25
    """
    from state_cache.store import open_cache

    if not run:
        raise InputError("--run is empty: name the run whose positions are added")
    run = which_run(run, runs_root)
    from flows.build_state_cache import build_state_cache

    path = run_flow(lambda: build_state_cache(None, runs_root, run=run, share=share))
    if path is None:  # no run has trained yet; the flow has reported it
        return
    cache = open_cache(path)
    reached = sum(snapshot.source.startswith("policy:") for snapshot in cache.train)
    print(f"{reached} of {len(cache.train)} positions to train from were reached by run {cache.settings.from_run}")
    print(
        "a run with the same cache settings starts from them with --cache.from-run newest; until the next refresh that means "
        f"--cache.from-run {cache.settings.from_run} --cache.from-groups {cache.settings.from_groups} "
        f"--cache.on-policy-share {cache.settings.on_policy_share}"
    )
    print(path)


@app.command
def show(*, runs_root: RunsRoot = Path("runs")) -> None:
    """List the caches: positions, source games, and positions by year, kind of phase and balance of power.

    Example

        entente cache show
    """
    from entente.evaluation.intervals import format_count
    from state_cache.store import open_cache

    for folder in _folders(runs_root):
        cache = open_cache(folder)
        for part, snapshots in (("train", cache.train), ("held out", cache.held_out)):
            games = format_count(len({snapshot.game_id for snapshot in snapshots}), "source games")
            print(f"{folder.name}, {part}: {format_count(len(snapshots), 'positions')} from {games}")
            Console().print(_strata_table(snapshots))


@app.command
def verify(*, runs_root: RunsRoot = Path("runs")) -> None:
    """Check every file of every cache and restore every position. Prints a line per cache; exits with 1 if one is damaged.

    Example

        entente cache verify
    """
    from entente.evaluation.intervals import format_count
    from state_cache.verify import verify

    damaged = 0
    for folder in _folders(runs_root):
        try:
            cache = verify(folder)
        except DataError as error:
            damaged += 1
            print(f"damaged  {folder.name}: {error}")
        else:
            train = format_count(len(cache.train), "positions")
            print(f"whole    {folder.name}: {train} to train from, {len(cache.held_out)} held out")
    if damaged:
        raise SystemExit(1)


def _folders(runs_root: Path) -> list[Path]:
    from state_cache.verify import list_caches

    folders = list_caches(runs_root / CACHE_FOLDER)
    if not folders:
        raise InputError(f"there is no state cache in '{runs_root / CACHE_FOLDER}': build one with `entente cache build`")
    return folders


def _strata_table(snapshots: "Sequence[Snapshot]") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    for title in ("year", "phases", "leading power"):
        table.add_column(title, no_wrap=True)
    table.add_column("positions", justify="right")
    for stratum, count in count_strata(snapshots).items():
        table.add_row(str(stratum.year), _PHASE_WORDS[stratum.phase_type], BALANCES[stratum.balance][1], str(count))
    return table
