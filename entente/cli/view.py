"""`entente view`: the runs, live, in a browser."""

import asyncio
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from entente.cli.options import AT_LEAST_1, RunsRoot, which_run
from entente.telemetry.errors import InputError


def view(
    run: Annotated[
        str, Parameter(help="Run to open; 'latest': the one that was last written to. Omitted: the list of runs.")
    ] = "",
    /,
    *,
    step: Annotated[int | None, Parameter(help="Step of the run to open.", validator=AT_LEAST_1)] = None,
    runs_root: RunsRoot = Path("runs"),
    port: Annotated[int, Parameter(help="Port; 0: any free one.", validator=validators.Number(gte=0, lte=65535))] = 0,
    browser: Annotated[bool, Parameter(help="Open the page in the browser.")] = True,
) -> None:
    """Look at runs in the browser, while they train or afterwards, until Ctrl-C: curves, steps, groups, decisions, games, SQL.

    Serves the pages on this machine only, at a URL with a secret key. It reads the runs' files, changes nothing, and needs no
    Prefect.

    Examples

        entente view

        entente view mine

        entente view mine --step 12
    """
    from entente.live_games.http_server import bind, make_server, new_key, serve
    from entente.view.server import view_app
    from entente.view.viewer import Viewer

    if not runs_root.is_dir():
        raise InputError(f"there is no folder '{runs_root}': name the folder of your runs with --runs-root")
    if step is not None and not run:
        raise InputError("--step needs a run: entente view RUN --step 12")
    run = which_run(run, runs_root) if run else ""
    viewer = Viewer(runs_root, new_key())
    if run:
        viewer.paths(run)
    place = viewer.link("step", run, step=step) if step is not None else viewer.link("run" if run else "runs", run)
    with bind("127.0.0.1", port, None) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def announce() -> None:
            print(f"http://{address}{place}\nCtrl-C ends it; the runs go on.", flush=True)
            if browser:
                webbrowser.open(f"http://{address}{place}")

        viewer.drawer.start()
        try:
            asyncio.run(serve(make_server(view_app(viewer, address), drain_s=1), listener, on_ready=announce))
        finally:
            viewer.close()
