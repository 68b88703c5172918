"""Claims about what runs on Kubernetes: every object is valid, and what one file names another file makes.

There is no cluster here. Objects are held against the schemas of Kubernetes, in the strict form that refuses unknown fields. The
Jobs of flow runs are those that Prefect's worker makes of deploy/job-template.json.
"""

import asyncio
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
import yaml
from kubernetes_validate import validate

from entente.cli.commands import command_line
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from flows import given_parameters
from flows.given_parameters import ADDRESSES_VARIABLE, check_parameters
from flows.recover_training import PENDING_S
from tests.test_docs import DEPLOYMENTS as OF_ONE_MACHINE
from tests.test_docs import OPERATIONS, PACKAGES, blocks, resolved

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OBJECTS = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]
NAMED = {f"{each['kind']}/{each['metadata']['name']}": each for each in OBJECTS}
PODS = {name: each["spec"]["template"]["spec"] for name, each in NAMED.items() if "template" in each.get("spec", {})}
TEMPLATE = json.loads((ROOT / "deploy" / "job-template.json").read_text())
DEPLOYED = yaml.safe_load((ROOT / "deploy" / "kubernetes.yaml").read_text())
DEPLOYMENTS = {each["name"]: resolved(each) for each in DEPLOYED["deployments"]}
RELEASES = ("1.30", "1.37")
"""Releases of Kubernetes whose schemas the objects fit: the oldest and the newest that were looked at."""
WORKER_URL = "http://prefect-server:4200/api"


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod["containers"] + pod.get("initContainers", [])


def job(name: str) -> dict[str, Any]:
    """The Job that Prefect's worker makes for a run of that deployment."""
    from prefect.client.schemas.objects import Flow, FlowRun
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    values = DEPLOYMENTS[name]["work_pool"]["job_variables"]
    assert set(values) <= set(TEMPLATE["variables"]["properties"]), "Prefect drops a variable that the template lacks"
    made = asyncio.run(
        KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, values, client=mock.AsyncMock())  # type: ignore[arg-type]
    )
    flow = Flow(id=uuid4(), name="train-policy")
    with temporary_settings({PREFECT_API_URL: WORKER_URL}):
        made.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=flow.id, name="train-Mine, seed0"), flow=flow)
    return made.job_manifest


def test_every_object_fits_the_strict_schema_of_its_kind():
    assert len(NAMED) > 10
    for name, each in NAMED.items():
        for release in RELEASES:
            assert validate(each, release, strict=True) == release
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "entente", name


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_flow_run_becomes_a_job_that_fits_the_strict_schema(name: str):
    made = job(name)
    pod = made["spec"]["template"]["spec"]
    # prefect-kubernetes demands these two in the pod, where Kubernetes drops them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    for release in RELEASES:
        validate(made, release, strict=True)
    (container,) = pod["containers"]
    assert [*container["command"], *container["args"]] == ["env", "prefect", "flow-run", "execute"], "not `entente prefect ...`"
    assert container["image"] == f"entente:{'cpu' if container['resources']['limits']['nvidia.com/gpu'] == '0' else 'gpu'}"
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["PREFECT_API_URL"] == WORKER_URL
    assert variables["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] != "reschedule", "an evicted run would begin again, not resume"
    assert "{{" not in json.dumps(made)


def test_every_pod_may_do_little_and_holds_no_secret():
    assert len(PODS) > 3
    for name, pod in (PODS | {"Job of a run": job("train")["spec"]["template"]["spec"]}).items():
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0, name
        assert pod.get("automountServiceAccountToken") is False or pod.get("serviceAccountName") == "prefect-worker", name
        for each in containers(pod):
            assert each["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, name
            assert {"cpu", "memory"} <= set(each["resources"]["requests"]) and "memory" in each["resources"]["limits"], name
            told = [
                e["name"]
                for e in each.get("env", [])
                if "value" in e and re.search(r"(?<!SECRET_)KEY$|PASSWORD|AUTH_STRING$", e["name"])
            ]
            assert told == [], f"{name} holds a secret itself"


def references(found: Any) -> set[tuple[str, str]]:
    """Kind and name of every Secret and claim that an object refers to, but optional ones."""
    if isinstance(found, list):
        return set().union(*map(references, found))
    if not isinstance(found, dict):
        return set()
    here = {
        (kind, found[field][key])
        for field, key, kind in (
            ("secretKeyRef", "name", "Secret"),
            ("secretRef", "name", "Secret"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        )
        if field in found and not found[field].get("optional")
    }
    return here.union(*map(references, found.values()))


def test_what_a_pod_needs_is_made_by_the_manifests_or_by_a_command_of_the_page():
    secrets = {
        words[words.index("generic") + 1]
        for block in blocks(OPERATIONS, "sh")
        for line in block.splitlines()
        if "create secret generic" in line and (words := shlex.split(line))
    }
    made = {("Secret", name) for name in secrets} | {tuple(name.split("/")) for name in NAMED}
    needed = references(OBJECTS) | references(TEMPLATE)
    assert len(needed) > 3 and needed <= made
    worker = {e["name"]: e.get("value") for e in PODS["Deployment/prefect-worker"]["containers"][0]["env"]}
    named = {name.rpartition("_")[2]: value for name, value in worker.items() if "AUTH_STRING_SECRET" in name}
    assert named == {"NAME": "entente", "KEY": "PREFECT_API_AUTH_STRING"}


def test_prefect_s_server_keeps_its_home_on_its_volume():
    (container,) = PODS["Deployment/prefect-server"]["containers"]
    (home,) = (each["mountPath"] for each in container["volumeMounts"] if each["name"] == "home")
    assert {"name": "PREFECT_HOME", "value": home} in container["env"]
    pages = tomllib.loads((ROOT / "prefect.toml").read_text())["server"]["ui"]["static_directory"]
    assert Path("/entente", pages).is_relative_to(home), "the pod's user cannot write pages beside Prefect's own files"


def test_a_run_names_each_inference_worker_by_an_address_of_its_own_and_may(monkeypatch: pytest.MonkeyPatch):
    workers, service = NAMED["StatefulSet/inference"]["spec"], NAMED["Service/inference"]["spec"]
    assert service["clusterIP"] == "None" and workers["serviceName"] == "inference"
    port = service["ports"][0]["port"]
    urls = tuple(f"http://inference-{number}.inference:{port}" for number in range(workers["replicas"]))
    settings = RunSettings.model_validate(DEPLOYMENTS["train"]["parameters"]["settings"])
    assert settings.inference.urls == urls
    variables = DEPLOYMENTS["train"]["work_pool"]["job_variables"]["env"]
    monkeypatch.setattr(given_parameters, "started_by_deployment", lambda: True)
    with pytest.raises(InputError, match=ADDRESSES_VARIABLE):
        check_parameters(settings.runs_root, settings=settings)
    monkeypatch.setenv(ADDRESSES_VARIABLE, variables[ADDRESSES_VARIABLE])
    check_parameters(settings.runs_root, settings=settings)


def test_the_inference_workers_serve_the_model_of_the_run_and_are_asked_without_a_key_whether_they_are_ready():
    (container,) = PODS["StatefulSet/inference"]["containers"]
    command, bound, _ = command_line().parse_args(container["args"], exit_on_error=False, print_error=False)
    served = bound.arguments
    settings = RunSettings.model_validate(DEPLOYMENTS["train"]["parameters"]["settings"]).inference
    assert command.__name__ == "serve" and served["model"] == settings.model
    assert (served["host"], served["port"]) == ("0.0.0.0", container["ports"][0]["containerPort"])
    for name in ("dtype", "max_model_length", "gpu_memory_utilization"):
        assert getattr(served["settings"], name) == getattr(settings, name)
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_deployments_bear_the_names_of_one_machine_and_take_their_parameters():
    one_machine = {each["name"]: each["entrypoint"] for each in OF_ONE_MACHINE}
    assert {name: each["entrypoint"] for name, each in DEPLOYMENTS.items()}.items() <= one_machine.items()
    for each in DEPLOYMENTS.values():
        file, function = each["entrypoint"].split(":")
        flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
        whoever_starts_it_gives = {"run": "mine"} if "run" in flow.parameters.required else {}
        assert flow.validate_parameters(each["parameters"] | whoever_starts_it_gives)
        assert each["work_pool"]["name"] == "kubernetes" and each["description"] and each["tags"]
        assert each["pull"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "/entente"}}]


def test_a_run_whose_pod_may_still_start_is_not_taken_for_lost():
    assert TEMPLATE["job_configuration"]["pod_watch_timeout_seconds"] < PENDING_S


def commands() -> list[list[str]]:
    """Every `prefect` command of the manifests."""
    found = [each["command"] for pod in PODS.values() for each in containers(pod) if each.get("command", [""])[0] == "prefect"]
    (setup,) = PODS["Job/setup"]["containers"]
    return found + [shlex.split(line) for line in setup["args"][0].splitlines() if line.startswith("prefect ")]


def test_prefect_knows_its_commands():
    from prefect.cli._app import _app

    assert len(commands()) == 4
    for words in commands():
        _app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_an_image_gets_every_package():
    assert len(PACKAGES) > 4 and {f"!{package}/" for package in PACKAGES} <= set(
        (ROOT / ".dockerignore").read_text().splitlines()
    )
