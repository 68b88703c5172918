"""The panels of a W&B workspace for a run, built from the metric registry with W&B's own library.

    python -m telemetry.dashboards --entity me --project entente

It needs a W&B login and the extra `dashboards`. The same questions in SQL, for the report and for users without W&B, lie in
storage/queries/ (`entente sql --run mine @`).
"""

import argparse
import sys
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
    """Name of the ready query with the same content; empty: it is in the view `metrics`."""

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
        Panel(title="Requests at vLLM servers", metrics=("workers/running_mean", "workers/waiting_mean", "workers/waiting_max")),
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
        Panel(title="GPUs busy", metrics=("gpu/utilisation", "gpu/utilisation_mean"), question="gpu_use"),
        Panel(
            title="Inside of the GPUs",
            metrics=("gpu/sm_activity_share", "gpu/sm_occupancy_share", "gpu/dram_bandwidth_share", "gpu/tensor_share"),
            question="gpu_use",
        ),
        Panel(title="GPU memory", metrics=("gpu/memory_share",), question="gpu_use"),
        Panel(title="Power", metrics=("gpu/power_w",), question="gpu_use"),
    ),
}  # fmt: skip
"""Section -> its panels."""


def workspace(entity: str, project: str) -> Any:
    """The `wandb_workspaces.workspaces.Workspace` of a project, not saved.

    Raises:
        InputError: the library is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports  # pyright: ignore[reportMissingImports]
        import wandb_workspaces.workspaces as workspaces  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("W&B's library for workspaces is missing: pip install 'entente[dashboards]'") from error
    sections = [
        workspaces.Section(
            name=name,
            is_open=True,
            panels=[reports.LinePlot(title=each.title, x="Step", y=list(each.metrics), title_y=each.unit) for each in panels],
        )
        for name, panels in PANELS.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=WORKSPACE, sections=sections)


def main(words: Sequence[str] | None = None) -> int:
    """The command in the module's docstring. Returns the exit code: 2 without a library or a login, or where W&B refuses."""
    parser = argparse.ArgumentParser(prog="python -m telemetry.dashboards", description="W&B's workspace for runs of Entente.")
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", default="entente", help="W&B project")
    chosen = parser.parse_args(words)
    try:
        _save(workspace(chosen.entity, chosen.project))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"made in W&B: '{WORKSPACE}' of {chosen.entity}/{chosen.project}\n")
    return 0


def _save(made: Any) -> None:
    import wandb

    try:
        made.save()
    except (wandb.Error, OSError, ValueError) as error:
        sentence = " ".join(str(error).split())
        raise InputError(
            f"W&B did not take the workspace ({sentence}): check the network, and log in by `wandb login`"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
