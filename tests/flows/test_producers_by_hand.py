"""A flow that plays nothing, and producers that are started, killed and told to end by hand: for real, and the audit holds."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow.ipc
import pytest

from storage.control import read_control, read_producer
from storage.runs import RunPaths
from telemetry.errors import DataError
from tests.chaos.audit_run import audit

STEPS = 30

pytestmark = pytest.mark.system


def wait(seconds: float, what: str, done: Callable[[], Any], *alive: Any) -> Any:
    """The first true answer of `done`, while these processes live."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in alive:
            assert process.poll() is None, f"while waiting for {what}, a process ended: {process.communicate()}"
        if answer := done():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{what} took more than {seconds} s")


def published(paths: RunPaths, producer: str) -> int:
    status = read_producer(paths, producer)
    return status.published if status is not None else 0


def trains(paths: RunPaths) -> bool:
    try:
        return not read_control(paths).stop
    except DataError:
        return False


def trained_on(paths: RunPaths) -> Counter[str]:
    """Rows that steps used, by producer."""
    used: Counter[str] = Counter()
    for file in paths.ledger.glob("step-*.arrow"):
        used.update(shard.split("/")[0] for shard in pyarrow.ipc.open_file(file).read_all()["shard"].to_pylist())
    return used


def test_a_run_of_producers_by_hand_survives_their_kills_and_nothing_is_lost_or_trained_twice(workplace: Any, trained: Any):
    paths = RunPaths(workplace.folder / "runs" / "fed")
    words = ("train", "--config", "small.toml", "--run", "fed", "--steps", str(STEPS), "--json")
    how = ("--pipeline.no-deterministic", "--pipeline.task-runner", "producers", "--pipeline.buffer-depth", "1")
    with ExitStack() as stack:

        def begin(*words: str) -> Any:
            process = stack.enter_context(workplace.start(*words))
            stack.callback(process.kill)
            return process

        training = begin(*words, *how)
        wait(120, "the run", lambda: trains(paths), training)
        first, second = (begin("produce", "--run", "fed", "--name", name) for name in ("first", "second"))
        wait(240, "both producers", lambda: published(paths, "first") and published(paths, "second"), training, first, second)
        first.kill()
        second.send_signal(signal.SIGTERM)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 143 and "told to end (SIGTERM)" in said
        status = read_producer(paths, "second")
        assert status is not None and (status.state, status.in_flight) == ("ended", 0)
        again, third = begin("produce", "--run", "fed", "--name", "first", "--json"), begin("produce", "--run", "fed", "--json")
        out, err = training.communicate(timeout=400)
        assert training.returncode == 0, err
        ends = [process.communicate(timeout=60) for process in (again, third)]
        assert [process.returncode for process in (again, third)] == [0, 0], ends
    (done,) = json.loads(ends[0][0].splitlines()[-1])
    assert done["producer"] == "first" and done["start_groups"] > 0 and done["why"] == "its training has ended"
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] == STEPS and summary["orders_rejected"] == 0
    audit(paths, STEPS, max_lag=2)
    used = trained_on(paths)
    assert "local" not in used and {"first", "second"} <= set(used) and len(used) == 3
