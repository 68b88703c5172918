"""No setting of a user's Prefect changes what a run means: each is pinned, or is listed here with the reason why it is free."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.settings import Settings
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from tasks.train_policy import ROLLOUT_RETRIES

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = {
    "flows.default_retries": "3",
    "flows.default_retry_delay_seconds": "600",
    "flows.heartbeat_frequency": "9000",
    "logging.log_prints": "true",
    "logging.to_api.when_missing_flow": "error",
    "results.default_serializer": "json",
    "results.default_storage_block": "s3-bucket/nobodys",
    "results.local_storage_path": "/nonexistent",
    "results.persist_by_default": "true",
    "server.api.default_limit": "2",
    "server.database.migrate_on_start": "false",
    "server.services.event_persister.enabled": "false",
    "server.services.scheduler.enabled": "false",
    "server.services.task_run_recorder.enabled": "false",
    "server.services.triggers.enabled": "false",
    "tasks.default_no_cache": "false",
    "tasks.default_persist_result": "true",
    "tasks.default_retries": "3",
    "tasks.default_retry_delay_seconds": "600",
    "tasks.refresh_cache": "true",
}
"""Settings that could change a run, each with a value that would."""
FREE = {
    "home": "where Prefect's files are",
    "profiles_path": "the same",
    "debug_mode": "more is logged",
    "api.": "where the server is and how it is reached",
    "cli.": "how the command `prefect` prints",
    "client.": "how long a server is waited for, and what is counted",
    "cloud.": "Prefect Cloud",
    "deployments.": "of deployments that name no work pool; each of ours does",
    "events.": "a queue's size",
    "experiments.": "a warning",
    "internal.": "more is logged",
    "logging.": "what is logged and where; the two that change a run are above",
    "plugins.": "code that the user installs to change Prefect",
    "runner.": "of `serve`, which nothing here calls",
    "server.": "how a server works; what ours must do is above",
    "tasks.disable_caching": "no task of ours has a cache",
    "tasks.runner.": "of submitted tasks; ours are awaited",
    "tasks.scheduling.": "of background tasks; there are none",
    "telemetry.": "what is measured",
    "testing.": "of Prefect's own tests",
    "worker.": "how often a worker asks",
    "ui_url": "a link",
    "silence_api_url_misconfiguration": "a warning",
}
"""Start of a setting's name, and what it decides."""
FLOWS = {"train_policy", "evaluate_policy", "build_state_cache", "recover_training"}
OWN_RETRIES = {
    "recover_training": 2,
    "roll_out_groups": ROLLOUT_RETRIES,
    "roll_out_on_dask": ROLLOUT_RETRIES,
    "roll_out_probe": ROLLOUT_RETRIES,  # a run whose buffer is deep plays one every 20 steps
}
OPTIONS = ("retries", "persist_result", "log_prints", "cache_policy", "result_storage")
LOOK = f"""
import importlib, json, pkgutil
from entente.prefect_server.environment import prepare_environment
prepare_environment(debug=True)
import flows, tasks
from prefect import Flow, Task
from prefect.settings import get_current_settings
objects = {{}}
for package in (flows, tasks):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, (Flow, Task)):
                objects[each.fn.__qualname__] = {{name: str(getattr(each, name, None)) for name in {OPTIONS!r}}}
settings = get_current_settings().model_dump(mode="json")
print(json.dumps([objects, settings]))
"""


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting with its path."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{path}{name}.")
        else:
            yield path + name, field


def variables(path: str, field: FieldInfo) -> list[str]:
    """The environment variables that set it."""
    choices = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else []
    names = [each.upper() for each in choices if isinstance(each, str)]
    return names or [f"PREFECT_{path.upper().replace('.', '_')}"]


def look(variables: dict[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """The options of all flows and tasks, by name, and Prefect's settings, in a process with these variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK], cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_each_setting_of_the_installed_prefect_is_pinned_or_free():
    names = [path for path, _ in fields(Settings)]
    assert set(HOSTILE) <= set(names)
    unknown = [name for name in names if name not in HOSTILE and not name.startswith(tuple(FREE))]
    assert unknown == [], "could it change what a run means? pin it, or say why it is free"


def test_flows_tasks_and_our_server_are_the_same_whatever_the_user_has_set():
    hostile = {name: HOSTILE[path] for path, field in fields(Settings) if path in HOSTILE for name in variables(path, field)}
    objects, settings = look(hostile)
    assert settings["flows"]["default_retries"] == 3, "the variables arrived"
    retries = {name: int(options.pop("retries")) for name, options in objects.items()}
    assert len(retries) >= 15 and {name: count for name, count in retries.items() if count} == OWN_RETRIES
    storages = {options.pop("result_storage") for name, options in objects.items() if name in FLOWS}
    assert storages == {".prefect/results"}, "no block of the user's is read"
    assert all(options["persist_result"] == "False" and options["log_prints"] != "True" for options in objects.values())
    assert all(options["cache_policy"] == str(NO_CACHE) or name in FLOWS for name, options in objects.items())
    assert settings["flows"]["heartbeat_frequency"] == 30 and settings["logging"]["to_api"]["when_missing_flow"] == "ignore"
    assert settings["server"]["api"]["default_limit"] == 200 and settings["server"]["database"]["migrate_on_start"]
    services = settings["server"]["services"]
    assert all(services[each]["enabled"] for each in ("event_persister", "scheduler", "task_run_recorder", "triggers"))
