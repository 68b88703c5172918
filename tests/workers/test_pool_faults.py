"""Workers fail in every way that could be thought of; no decision is lost, doubled or recorded under the wrong version.

Where an answer passes through a faulty proxy the worker behind it is whole; where a process is killed, stopped or started again
it is a real one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from game.board import POWERS
from records.policy_version import BASE_HASH
from rollouts.roll_out import RolledOut, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from storage.schema import to_table
from telemetry.errors import EngineError, EngineLostError
from tests.command import ROOT
from tests.waiting import wait_until
from tests.workers.faulty_proxy import FAULTS, WRONG, FaultyProxy
from tests.workers.plain_worker import PlainEngine
from tests.workers.test_pool import check, draw, pools, request_for, root, workers

__all__ = ["pools", "request_for", "root", "workers"]  # fixtures


@pytest.fixture
def proxies() -> Iterator[Callable[[str], FaultyProxy]]:
    opened: list[FaultyProxy] = []

    def open_one(url: str) -> FaultyProxy:
        opened.append(FaultyProxy(url))
        return opened[-1]

    yield open_one
    for proxy in opened:
        proxy.close()


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, model: Path, root: Path, port: int = 0, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.plain_worker", str(model), str(root), str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        )
        self.url = ""

    def wait(self) -> "WorkerProcess":
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the worker did not start"
        return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def processes(model: Path, root: Path) -> Iterator[Callable[..., list[WorkerProcess]]]:
    """Start worker processes side by side: `processes(2, PLAIN_DELAY_S="0.05")`."""
    started: list[WorkerProcess] = []

    def start(count: int, *, port: int = 0, **environment: str) -> list[WorkerProcess]:
        fresh = [WorkerProcess(model, root, port, **environment) for _ in range(count)]
        started.extend(fresh)
        return [process.wait() for process in fresh]

    yield start
    for process in started:
        process.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_is_drawn_again_elsewhere_and_its_worker_gets_no_more_work_until_it_is_well(
    host, pools, workers, proxies, request_for, fault
):
    proxy, good = proxies(workers().url), workers()
    pool = pools(proxy.url, good, request=1.0)
    proxy.fault = fault
    requests = [request_for(number) for number in range(40)]
    check(requests, draw(host, pool, requests).result(timeout=30))
    events = pool.events()
    assert proxy.faults and events["ejections"] >= 1 and events["retries"] >= 3
    assert bool(events["rejected_answers"]) == (fault in WRONG)
    assert bool(events["timeouts"]) == (fault == "no answer")
    proxy.fault = ""
    wait_until(lambda: pool.events()["readmissions"] >= 1)
    more = [request_for(number) for number in range(100, 140)]
    check(more, draw(host, pool, more).result(timeout=30))


def test_a_pool_whose_only_worker_answers_wrongly_ends_with_a_sentence(host, pools, workers, proxies, request_for):
    proxy = proxies(workers().url)
    pool = pools(proxy.url)
    proxy.fault = "wrong token ids"
    with pytest.raises(EngineLostError, match=r"failed 4 times; the last, http.*not legal at node"):
        draw(host, pool, [request_for(1)]).result(timeout=60)


def test_one_slow_answer_is_drawn_again_and_counted_once(
    host, pools, workers, proxies, request_for, monkeypatch: pytest.MonkeyPatch
):
    """The worker behind the proxy is asked twice under one name and draws once."""
    monkeypatch.setattr("workers.pool.REQUEST_ATTEMPTS", 5)
    end = workers()
    proxy = proxies(end.url)
    pool = pools(proxy.url, request=0.5)
    proxy.fault = "no answer"
    drawing = draw(host, pool, [request_for(1)])
    wait_until(lambda: pool.events()["timeouts"] >= 1)
    proxy.fault = ""
    check([request_for(1)], drawing.result(timeout=20))
    assert len(end.engine.requests) == 1, "the same request was drawn twice"


@pytest.mark.system
def test_a_process_told_to_end_answers_what_is_in_flight_and_ends_cleanly(host, pools, processes, request_for):
    (one,) = processes(1, PLAIN_DELAY_S="1.5")
    pool = pools(one.url, heartbeat=0.5)
    requests = [request_for(number) for number in range(8)]
    drawing = draw(host, pool, requests)
    wait_until(lambda: host.submit(pool.stats()).result(timeout=10).requests == 8)
    one.process.terminate()
    check(requests, drawing.result(timeout=10))
    assert pool.events()["retries"] == 0 and pool.events()["ejections"] == 1
    assert one.process.wait(timeout=10) == 0


def play(host, engine, tokens, positions, on_group=None) -> RolledOut:
    settings = RolloutSettings(
        start_groups=len(positions), policy_powers="all", forks_per_group=3, horizon_years=1, last_winter=True, opponents="mover"
    )
    groups = plan_start_groups([(snapshot, POWERS[0]) for snapshot in positions], 0, settings)
    rolling = roll_out(groups, engine, tokens, settings, producer="local", seed=5, on_group=on_group)
    return host.submit(rolling).result(timeout=120)


TIMES = ("queue_ms", "prefill_ms", "decode_ms", "engine_ms", "worker", "checksum")


def same_rows(one: RolledOut, other: RolledOut) -> bool:
    """All columns of all rows, but for times, who drew, and the checksum over these."""
    tables = [to_table(played.decisions).drop_columns(list(TIMES)) for played in (one, other)]
    return tables[0].equals(tables[1]) and one.plies == other.plies


@pytest.mark.system
def test_a_rollout_over_two_workers_one_killed_half_way_has_every_row_and_none_left_ends_it_with_one_sentence(
    host, pools, processes, tokens, positions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("workers.pool.AFFINITY_MARGIN", 2)
    undisturbed = play(host, PlainEngine(), tokens, positions[:4])
    one, other = processes(2, PLAIN_DELAY_S="0.02")
    pool = pools(one.url, other.url, request=60.0, no_worker=1.0)
    drawn = 0
    ask = pool.generate

    async def kill_half_way(request):
        nonlocal drawn
        drawn += 1
        if drawn == len(undisturbed.decisions) // 2:
            one.process.kill()
        return await ask(request)

    pool.generate = kill_half_way  # type: ignore[method-assign]
    played = play(host, pool, tokens, positions[:4])
    assert played.failed_forks == 0 and len(played.decisions) == len(undisturbed.decisions) > 150
    assert same_rows(played, undisturbed)
    assert len({row.decision_id for row in played.decisions}) == len(played.decisions)
    workers_of = {row.worker for row in played.decisions}
    assert workers_of == {f"plain:{one.port}", f"plain:{other.port}"}
    assert {(row.policy_version, row.adapter_hash) for row in played.decisions} == {(0, BASE_HASH)}
    assert pool.events()["ejections"] == 1 and pool.events()["retries"] >= 1

    other.process.kill()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"forks failed; the first: no worker came back within 1 s .*entente serve"):
        play(host, pool, tokens, positions[:2])
    assert time.monotonic() - began < 20
    assert np.isfinite(list(pool.events().values())).all()
