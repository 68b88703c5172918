"""Finds the checkout that a Prefect server belongs to: working folder of its deployments, and of the process behind a port.

Two checkouts have deployments of the same names: deploying the second to the first's server would move them all, including the
recovery of the first one's runs.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from entente.telemetry.errors import InputError

if TYPE_CHECKING:
    from prefect.client.schemas.responses import DeploymentResponse

_STEP = "prefect.deployments.steps.set_working_directory"
"""Step of a deployment that names the working folder of its runs."""


def check_folder(address: str, entrypoints: Iterable[str], deployments: Iterable["DeploymentResponse"], *, moved: bool) -> None:
    """Raise InputError if the server's deployments of these entrypoints run in another folder. With `moved` the server belongs
    to this folder, so deployments of a missing folder date from before a rename."""
    steps = (step for each in deployments if each.entrypoint in set(entrypoints) for step in each.pull_steps or ())
    for folder in sorted({step[_STEP]["directory"] for step in steps if _STEP in step}):
        if Path(folder).resolve() != Path.cwd() and not (moved and not Path(folder).exists()):
            raise InputError(
                f"the deployments of the Prefect server at {address} run in another folder, '{folder}': choose another server, "
                "on this machine with --port; if that folder is gone, remove them with `prefect deployment delete --all`"
            )


def folder_behind(port: int) -> str:
    """The working folder of the process that listens on a port of this machine; empty if unknown."""
    with suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return psutil.Process(each.pid).cwd()
    return ""
