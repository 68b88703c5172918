"""`entente bench tune`, tried as a user: a small grid."""

import json
from typing import Any

import pytest

from entente.settings.layers import layered_settings

SMALL = ["--run", "first", "--max-sequences", "32", "--max-batched-tokens", "4096", "--start-groups", "2", "--rounds", "1"]


@pytest.mark.slow
def test_a_grid_ends_with_settings_that_a_run_takes(trained: Any, workplace: Any):
    done = workplace.process("bench", "tune", *SMALL, "--min-cache-hit", "0", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["chosen"]["decisions_per_s"] > 0
    assert outcome["chosen"]["latency_ms_p99"] > outcome["chosen"]["first_token_ms"] > 0
    tuned = workplace.folder / "runs" / "_tuning" / "first" / "tuned.toml"
    assert layered_settings("laptop", [workplace.folder / "small.toml", tuned]).inference.max_batched_tokens == 4096
    again = workplace.process("bench", "tune", *SMALL, "--max-latency-ms", "0.001", timeout=600)
    assert again.returncode == 2 and "exceeds max_latency_ms 0" in again.stderr and not tuned.exists()
