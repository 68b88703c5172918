"""The panels that a run is watched by: once as a list over the registry of metrics, and from it as a workspace of W&B.

    python -m telemetry.dashboards > workspace.json                     the description alone
    python -m telemetry.dashboards --entity me --project entente        made in W&B, which needs a login

The same questions in SQL, for the report and for whoever has no W&B, lie in storage/queries/ (`entente sql --run mine @`).
"""

import argparse
import base64
import json
import netrc
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.errors import InputError
from telemetry.metrics import METRICS

WORKSPACE = "entente: a run at work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart over a run's steps; its metrics share a unit."""

    title: str
    metrics: tuple[str, ...]
    question: str = ""
    """The ready question that asks the same of a run's files; empty: `metrics` has it."""

    @property
    def unit(self) -> str:
        """Unit of all its metrics."""
        return METRICS[self.metrics[0]].unit


PANELS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(title="Return", metrics=("train/return_mean",), question="return_by_version_and_power"),
        Panel(title="Entropy over legal sets", metrics=("train/entropy", "train/entropy_p10"), question="order_entropy"),
        Panel(title="Engine and trainer differ by", metrics=("mismatch/mean", "mismatch/p99", "mismatch/largest")),
        Panel(title="Legal mass", metrics=("train/legal_mass_p10", "train/legal_mass_p50"), question="legal_mass_over_time"),
    ),
    "Rollouts": (
        Panel(
            title="Rollout latency, medians",
            metrics=("rollout/queue_ms_p50", "rollout/prefill_ms_p50", "rollout/decode_ms_p50", "rollout/engine_ms_p50"),
            question="rollout_latency",
        ),
        Panel(
            title="Tokens a second",
            metrics=("rollout/tokens_per_s", "train/tokens_per_s", "train/unique_tokens_per_s"),
            question="tokens_per_second",
        ),
        Panel(title="Prefix cache hits", metrics=("rollout/prefix_hit_share",)),
        Panel(title="Requests at workers", metrics=("workers/running_mean", "workers/waiting_mean", "workers/waiting_max"),
              question="worker_queue"),
    ),
    "Policy lag": (
        Panel(title="Policy lag", metrics=("train/policy_lag_p50", "train/policy_lag_max"), question="lag_histogram"),
        Panel(
            title="Rows by policy lag",
            metrics=(
                "train/policy_lag_0_share", "train/policy_lag_1_share", "train/policy_lag_2_share", "train/policy_lag_more_share"
            ),
            question="lag_histogram",
        ),
    ),
    "Waiting": (
        Panel(
            title="Where a step goes",
            metrics=("time/step_s", "time/rollout_wait_s", "time/train_s", "time/publish_s", "time/orchestration_s"),
        ),
        Panel(title="The trainer waits", metrics=("time/trainer_wait_s", "time/rollout_wait_s"), question="trainer_idle_share"),
        Panel(title="Prefect and the flow", metrics=("time/orchestration_share",)),
    ),
    "GPUs": (
        Panel(title="GPUs busy", metrics=("gpu/utilisation", "gpu/utilisation_mean", "workers/gpu_utilisation_mean"),
              question="gpu_use"),
        Panel(
            title="Inside of the GPUs",
            metrics=("gpu/sm_activity_share", "gpu/sm_occupancy_share", "gpu/dram_bandwidth_share", "gpu/tensor_share"),
            question="gpu_use",
        ),
        Panel(title="GPU memory", metrics=("gpu/memory_share", "workers/gpu_memory_share_max"), question="gpu_use"),
        Panel(title="Power", metrics=("gpu/power_w", "workers/gpu_power_w"), question="gpu_use"),
    ),
}  # fmt: skip
"""Section -> its panels."""
TABLES = ("tables/sampled_game", "tables/policy_lag", "tables/workers", "tables/logs")
"""Keys of the tables that a run logs (telemetry/sinks.py, pipeline/run_tables.py)."""


def workspace() -> dict[str, Any]:
    """W&B's description of a saved view of a project."""
    sections = [_section(name, [_line_plot(panel) for panel in panels]) for name, panels in PANELS.items()]
    sections.append(_section("Games and workers", [_table(key) for key in TABLES]))
    bank = {"state": 0, "settings": {"autoOrganizePrefix": 2, "showEmptySections": False, "sortAlphabetically": False}}
    return {
        "section": {
            "name": WORKSPACE,
            "panelBankConfig": bank | {"sections": sections},
            "panelBankSectionConfig": _section("Report Panels", []) | {"type": "grid"},
            "customRunColors": {},
            "settings": {"xAxis": "_step", "smoothingWeight": 0, "smoothingType": "none", "shouldAutoGeneratePanels": False},
            "openRunSet": 0,
            "openViz": True,
        },
        "vizExpanded": False,
        "libraryExpanded": True,
    }


def _section(name: str, panels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    flow = {"snapToColumns": True, "columnsPerPage": 3, "rowsPerPage": 2, "gutterWidth": 16, "boxWidth": 460, "boxHeight": 300}
    placed = [
        panel | {"__id__": f"{name}-{number}".lower().replace(" ", "-"), "layout": {"x": 8 * (number % 3), "y": 6 * (number // 3),
                                                                                  "w": 8, "h": 6}}
        for number, panel in enumerate(panels)
    ]  # fmt: skip
    return {"name": name, "isOpen": True, "type": "flow", "flowConfig": flow, "sorted": 0, "panels": placed}


def _line_plot(panel: Panel) -> dict[str, Any]:
    config = {"chartTitle": panel.title, "xAxis": "_step", "metrics": list(panel.metrics), "yAxisTitle": panel.unit}
    return {"viewType": "Run History Line Plot", "config": config}


def _table(key: str) -> dict[str, Any]:
    return {"viewType": "Media Browser", "config": {"columnCount": 1, "mediaKeys": [key]}}


_MUTATION = """
mutation MakeView($entity: String, $project: String, $name: String, $title: String, $spec: String) {
  upsertView(input: {entityName: $entity, projectName: $project, name: $name, displayName: $title, type: "project-view",
                     spec: $spec}) { view { id } inserted }
}
"""


def make_in_wandb(entity: str, project: str) -> None:
    """Make the workspace in a project of W&B, by the call that W&B's own pages make.

    Raises:
        InputError: there is no login, or W&B refuses.
    """
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
    told = {"entity": entity, "project": project, "name": "nw-entente-v", "title": WORKSPACE, "spec": json.dumps(workspace())}
    login = base64.b64encode(f"api:{_key(server)}".encode()).decode()
    request = urllib.request.Request(
        f"{server}/graphql",
        json.dumps({"query": _MUTATION, "variables": told}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Basic {login}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            said = json.load(answer)
    except (OSError, ValueError) as error:
        raise InputError(f"W&B at {server} did not take the workspace ({error}): look at the network and the login") from error
    if said.get("errors"):
        raise InputError(f"W&B refused the workspace: {said['errors'][0].get('message', said['errors'][0])}")


def _key(server: str) -> str:
    """The API key that `wandb login` left, or the environment's."""
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    try:
        found = netrc.netrc().authenticators(urllib.parse.urlsplit(server).hostname or "")
    except (OSError, netrc.NetrcParseError):
        found = None
    if found is None or not found[2]:
        raise InputError("W&B has no login here: `wandb login`, or set WANDB_API_KEY")
    return found[2]


def main(words: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m telemetry.dashboards", description="W&B's workspace for runs of Entente.")
    parser.add_argument("--entity", help="W&B user or team; without it the description is printed")
    parser.add_argument("--project", default="entente", help="W&B project")
    chosen = parser.parse_args(words)
    if not chosen.entity:
        sys.stdout.write(json.dumps(workspace(), indent=1) + "\n")
        return 0
    try:
        make_in_wandb(chosen.entity, chosen.project)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"made in W&B: '{WORKSPACE}' of {chosen.entity}/{chosen.project}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
