"""`entente cache`: build and show the state cache."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from cli.dry_run import DryRun, PlanAsJson, show_plan
from state_cache.settings import CacheSettings

app = App(name="cache", help="Frozen mid-game positions that rollouts start from.")

RunsRoot = Annotated[Path, Parameter(help="Folder of runs and caches.")]
CacheFlags = Annotated[CacheSettings | None, Parameter(name="*", help="Any setting of the cache.")]


@app.command
def build(
    *,
    runs_root: RunsRoot = Path("runs"),
    dry_run: DryRun = False,
    json: PlanAsJson = False,
    settings: CacheFlags = None,
) -> None:
    """Play scripted games and freeze positions; the same settings are built once.

    Examples

        entente cache build

        entente cache build --train-snapshots 1000 --last-year 1907 --seed 3
    """
    if dry_run:
        from flows.plan_run import plan_cache

        return show_plan(plan_cache(settings or CacheSettings(), runs_root), json=json)
    from cli.prefect_server import prefect_server
    from cli.screen import progress_shown
    from flows.build_state_cache import build_state_cache

    with prefect_server(), progress_shown():
        path = asyncio.run(build_state_cache(settings or CacheSettings(), runs_root))
    print(path)


@app.command
def show(*, runs_root: RunsRoot = Path("runs")) -> None:
    """List the caches, their positions and source games, and the years they come from.

    Example

        entente cache show
    """
    from flows.run_settings import CACHE_FOLDER
    from state_cache.store import open_cache
    from telemetry.errors import InputError

    folders = sorted(path.parent for path in (runs_root / CACHE_FOLDER).glob("v-*/manifest.json"))
    if not folders:
        raise InputError(f"there is no state cache in '{runs_root / CACHE_FOLDER}': build one with `entente cache build`")
    table = Table("cache", "part", "positions", "source games", "positions by year")
    for folder in folders:
        cache = open_cache(folder)
        for part, snapshots in (("train", cache.train), ("held out", cache.held_out)):
            years = Counter(snapshot.year for snapshot in snapshots)
            spread = "  ".join(f"{year}: {count}" for year, count in sorted(years.items()))
            games = len({snapshot.game_id for snapshot in snapshots})
            table.add_row(folder.name, part, str(len(snapshots)), str(games), spread)
    Console().print(table)
