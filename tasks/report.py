"""The report task: the command `entente report` writes a run's page in its own process.

Its own process keeps DuckDB and the plots out of one that holds an engine. A report that cannot be written does not fail the run.
"""

import asyncio
import sys

from prefect import task
from prefect.cache_policies import NO_CACHE

from entente.telemetry.progress import reporter
from storage.runs import RunPaths


@task(name="report", cache_policy=NO_CACHE, persist_result=False, tags=["report"])
async def write_report_page(paths: RunPaths) -> None:
    """Write the run's `report.html`."""
    words = ["-P", "-m", "entente.cli.main", "report", "--run", paths.root.name, "--runs-root", str(paths.root.parent)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        reporter().say(f"the report was not written ({' '.join(last) or process.returncode}); try `entente report`")
