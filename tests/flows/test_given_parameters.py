"""What a deployment's parameters may reach on the machine that runs the flow: each flow refuses the rest at once."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from entente.evaluation.settings import EvaluationSettings, MatchSettings
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from flows import given_parameters
from flows.build_state_cache import build_state_cache
from flows.evaluate_policy import evaluate_policy
from flows.given_parameters import ADDRESSES_VARIABLE, ROOTS_VARIABLE, check_parameters
from flows.recover_training import recover_training
from flows.train_policy import train_policy
from tests.test_docs import resolved

ROOT = Path(__file__).resolve().parents[2]
Begin = Callable[[], Coroutine[Any, Any, Any]]
OUT = Path("/nowhere/runs")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder, in a flow run that a deployment began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(given_parameters, "started_by_deployment", lambda: True)
    for name in (ROOTS_VARIABLE, ADDRESSES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def settings(**changed: Any) -> RunSettings:
    return layered_settings("laptop", [], changed)


FLOWS: dict[str, Callable[[Path], Coroutine[Any, Any, Any]]] = {
    "train_policy": lambda root: train_policy.fn(settings(runs_root=root)),
    "build_state_cache": lambda root: build_state_cache.fn(None, root),
    "evaluate_policy": lambda root: evaluate_policy.fn("mine", runs_root=root, evaluation=EvaluationSettings()),
    "recover_training": lambda root: recover_training.fn(runs_root=root),
}


def test_every_deployed_flow_is_among_those_that_are_tried():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {each["entrypoint"].split(":")[1] for each in deployments} == set(FLOWS)


@pytest.mark.parametrize(
    ("flow", "root"),
    [*((flow, OUT) for flow in FLOWS), *(("train_policy", Path(root)) for root in (".", "runs/../flows", "runs/mine"))],
    ids=str,
)
def test_no_flow_works_in_a_folder_that_the_machine_did_not_list(place: Path, flow: str, root: Path):
    with pytest.raises(InputError, match=r"may not be given runs_root .*ENTENTE_RUNS_ROOTS"):
        asyncio.run(FLOWS[flow](root))
    assert list(place.iterdir()) == []


REFUSED: dict[str, tuple[str, Begin]] = {
    "inference.urls": ("inference.urls", lambda: train_policy.fn(settings(inference={"urls": ["http://evil.example"]}))),
    "storage.selection": (
        "storage.selection: .*`entente train`",
        lambda: train_policy.fn(settings(storage={"selection": "FROM candidates SELECT shard, start_group"})),
    ),
    "inference.model": ("inference.model '/etc'", lambda: train_policy.fn(settings(inference={"model": "/etc"}))),
    "dask_address": (
        "pipeline.dask_address",
        lambda: train_policy.fn(settings(pipeline={"task_runner": "dask", "dask_address": "tcp://evil.example:1"})),
    ),
    "run": ("cannot name a folder", lambda: train_policy.fn(settings().model_copy(update={"run": "../out"}))),
    "cache.from_run": ("cannot name a folder", lambda: train_policy.fn(settings(cache={"from_run": "../out", "from_groups": 8}))),
    "run to evaluate": ("cannot name a folder", lambda: evaluate_policy.fn("../out")),
    "player": (
        "the player '/etc': name a folder in 'models' or 'runs/_models'",
        lambda: evaluate_policy.fn("", match=MatchSettings(players=("/etc", "mover"))),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_no_parameter_reaches_a_shell_an_address_or_a_path(place: Path, what: str):
    said, begin = REFUSED[what]
    with pytest.raises(InputError, match=said):
        asyncio.run(begin())
    assert list(place.iterdir()) == []


def test_a_folder_below_the_worker_s_is_no_hub_id(place: Path):
    (place / "exported" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match=r"inference.model 'exported/mine'"):
        check_parameters(Path("runs"), settings=settings(inference={"model": "exported/mine"}))


def test_the_command_line_may_name_what_it_likes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(given_parameters, "started_by_deployment", lambda: False)
    check_parameters(OUT, settings=settings(inference={"urls": ["http://gpu:1"], "model": "/srv/model"}))


def test_what_the_machine_lists_may_be_named(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ROOTS_VARIABLE, f"{OUT}:/srv/more")
    monkeypatch.setenv(ADDRESSES_VARIABLE, "http://gpu-1:8100, tcp://dask:8786")
    for root in (Path("runs"), place / "runs", OUT, Path("/srv/more")):
        check_parameters(root)
    dask = {"task_runner": "dask", "dask_address": "tcp://dask:8786"}
    given = settings(inference={"urls": ["http://gpu-1:8100"]}, pipeline=dask, run="mine")
    check_parameters(Path("runs"), settings=given)
    for model in ("tiny", "Qwen/Qwen2.5-7B-Instruct", "runs/_models/mine"):
        check_parameters(Path("runs"), settings=settings(inference={"model": model}))


def test_the_parameters_of_every_deployment_are_accepted(place: Path):
    for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        given = resolved(each)["parameters"]
        training = each["entrypoint"].endswith(":train_policy")
        run_settings = RunSettings.model_validate(given["settings"]) if training else None
        check_parameters(Path(given.get("runs_root", "runs")), settings=run_settings)
