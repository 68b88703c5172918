"""What a step in a bucket costs is a ratio of neighbours in time, less one."""

import pytest

from benchmarks.bucket import bucket_figures


def test_each_round_is_compared_with_itself():
    seconds = {"folder": [1.0, 10.0, 2.0], "bucket": [1.2, 11.0, 2.2]}
    found = bucket_figures(seconds, {"folder": [1.0], "bucket": [0.9]})
    assert found["bucket_step_cost"] == pytest.approx(0.1)
    assert found["bucket_cpu_cost"] == pytest.approx(-0.1)
    assert (found["folder_step_s"], found["bucket_step_s"]) == (2.0, 2.2)
