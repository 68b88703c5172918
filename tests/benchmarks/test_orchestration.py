"""What orchestration costs is measured on tasks that a server really saw."""

import pytest

from benchmarks.orchestration import completed, run_empty_tasks


@pytest.mark.system
def test_a_server_sees_every_empty_task_completed(prefect_server: str):
    found = run_empty_tasks(prefect_server, 5)
    assert found["tasks"] == 5 and found["seconds"] > 0 and found["cpu_s"] > 0
    assert completed(prefect_server, found["flow_run"]) <= found["all_tasks"] == 13
