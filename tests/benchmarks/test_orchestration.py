"""What orchestration costs is measured on tasks that a server really saw, and on figures of steps that were really made."""

import pytest

from benchmarks.entente_run import RunFigures
from benchmarks.orchestration import ServedRun, completed, run_empty_tasks, share_figures


@pytest.mark.system
def test_a_server_sees_every_empty_task_completed(prefect_server: str):
    found = run_empty_tasks(prefect_server, 5)
    assert found["tasks"] == 5 and found["seconds"] > 0 and found["cpu_s"] > 0
    assert completed(prefect_server, found["flow_run"]) <= found["all_tasks"] == 13


def served(steps: int, *, tree_s: float, server_s: float, tasks: int) -> ServedRun:
    """A run whose processes, without the server, have spent `tree_s` CPU seconds a step."""
    cpu_s = [7.0 + tree_s * number for number in range(steps)]
    return ServedRun(figures=RunFigures(steps=[{}] * steps, cpu_s=cpu_s, summary={}, lags=[]), server_cpu_s=server_s, tasks=tasks)


def test_prefects_share_is_of_the_cpu_time_of_all_processes_in_the_further_steps():
    """By hand: 10 steps more have 20 tasks of 5 ms in the client and 0.3 s in the server, beside 1.97 s a step of all others."""
    short = served(2, tree_s=1.97, server_s=1.0, tasks=30)
    found = share_figures(short, served(12, tree_s=1.97, server_s=1.3, tasks=50), client_ms=5.0)
    assert found["prefect_tasks_per_step"] == pytest.approx(2)
    assert found["prefect_client_cpu_ms_per_step"] == pytest.approx(10)
    assert found["prefect_server_cpu_ms_per_step"] == pytest.approx(30)
    assert found["orchestration_cpu_share"] == pytest.approx(0.04 / 2.0)
