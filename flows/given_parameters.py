"""The parameters of a flow run: they determine its name, and those from a deployment are checked.

Anyone who reaches Prefect's server can set them. So they may hold no shell command and no SQL; the Prefect worker's
environment lists the permitted run folders and addresses; everything else is a plain name inside the folder of runs. Flow runs
that `entente` starts itself, and subflows, are not checked.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from entente.decoding.model_files import may_be_hub_id
from entente.game.scripted import SEARCHES
from entente.players.endpoint import read_endpoint
from entente.players.opponents import is_endpoint
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.runs import MODEL_FOLDER, check_name

ROOTS_VARIABLE = "ENTENTE_RUNS_ROOTS"
"""Environment variable: run folders that a deployed flow run may use besides `runs` in the working folder."""
ADDRESSES_VARIABLE = "ENTENTE_ADDRESSES"
"""Environment variable: comma-separated addresses of vLLM servers, trainers, Dask schedulers and endpoints it may use."""
PUBLISHED_MODELS = Path("models")
"""Folder of models that are part of the repository, in the working folder of a Prefect worker."""
PINNED: dict[str, Any] = {
    "retries": 0,  # A second attempt would find the run's name taken, which hides the error. `recover-training` resumes runs.
    "log_prints": False,
    "persist_result": False,
    "result_storage": Path(".prefect/results"),  # Never written. Without it Prefect loads the user's default storage block.
}
"""Options of every flow; without them Prefect uses the user's settings."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def named_after(kind: str, *path: str) -> Callable[[], str]:
    """The name of a flow run: `kind-VALUE` by the parameter at `path`, or `kind` if it is not set."""

    def name() -> str:
        value: Any = flow_run.parameters  # not validated yet: settings, or the plain mapping from the UI
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        return f"{kind}-{value}" if value else kind

    return name


def started_by_deployment() -> bool:
    """True if a deployment started this flow run: from the UI, a schedule, an automation or the API."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def check_parameters(
    runs_root: Path,
    *,
    settings: RunSettings | None = None,
    runs: Iterable[str] = (),
    players: Iterable[str] = (),
) -> None:
    """Raise InputError, with parameter and remedy, for parameters that a deployment may not set. Without a deployment anything
    goes. `runs` may hold empty names."""
    for run in filter(None, runs):
        check_name(run, "run")
    if not started_by_deployment():
        return
    _check_root(runs_root)
    players = list(players)
    _check_endpoints(players)
    for player in players:
        if "/" in player and not is_endpoint(player) and not _is_model_folder(Path(player.removesuffix(SEARCHES)), runs_root):
            raise _refused(f"the player '{player}'", f"name a folder in '{PUBLISHED_MODELS}' or '{runs_root / MODEL_FOLDER}'")
    if settings is not None:
        _check_settings(settings, runs_root)


def _check_settings(settings: RunSettings, runs_root: Path) -> None:
    inference = settings.inference
    _check_root(settings.runs_root)
    if settings.storage.selection:
        raise _refused("storage.selection", "its SQL is run without limits; leave it out, or begin the run with `entente train`")
    for run in filter(None, (settings.run, settings.cache.from_run)):
        check_name(run, "run")
    _check_endpoints(settings.rollouts.endpoints)
    _check_addresses("inference.urls", inference.urls)
    _check_addresses("pipeline.dask_address", filter(None, [settings.pipeline.dask_address]))
    hub_id = _HUB_ID.fullmatch(inference.model) and may_be_hub_id(inference.model)
    if inference.model != "tiny" and not hub_id and not _is_model_folder(Path(inference.model), runs_root):
        cure = f"name 'tiny', a hub id, or a folder in '{runs_root / MODEL_FOLDER}' or '{PUBLISHED_MODELS}'"
        raise _refused(f"inference.model '{inference.model}'", cure)


def _is_model_folder(folder: Path, runs_root: Path) -> bool:
    return any(folder.resolve().is_relative_to(root.resolve()) for root in (PUBLISHED_MODELS, runs_root / MODEL_FOLDER))


def _check_root(runs_root: Path) -> None:
    listed = os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep)
    if runs_root.resolve() not in [Path(each).resolve() for each in ("runs", *filter(None, listed))]:
        raise _refused(f"runs_root '{runs_root}'", f"list it in {ROOTS_VARIABLE} where the Prefect worker is started")


def _check_addresses(name: str, addresses: Iterable[str]) -> None:
    listed = {each.strip() for each in os.environ.get(ADDRESSES_VARIABLE, "").split(",")}
    for each in addresses:
        if each not in listed:
            raise _refused(f"{name} '{each}'", f"list it in {ADDRESSES_VARIABLE} where the Prefect worker is started")


def _check_endpoints(players: Iterable[str]) -> None:
    _check_addresses("a player at", (read_endpoint(player).url for player in players if is_endpoint(player)))


def _refused(what: str, cure: str) -> InputError:
    return InputError(f"a run that Prefect starts may not be given {what}: {cure}")
