"""Workers' Prometheus pages, read on a beat: what a step and a question in SQL are told of them."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decoding.model_files import model_fingerprint
from inference.engine import EngineStats, EngineWithWorkerFigures
from inference.host import EngineHost
from inference.settings import InferenceSettings
from storage.asking import ask, connect
from storage.runs import RunPaths
from telemetry.metrics import METRICS
from tests.waiting import wait_until
from tests.workers.plain_worker import PlainEngine, WorkerHere
from workers import worker_metrics
from workers.pool import RemoteEngine
from workers.pool_worker import PoolTimes
from workers.worker_metrics import WorkerMetrics
from workers.worker_scrape import WorkerScrape, read_series

KEY = "a key"


def test_a_page_gives_ours_and_vllms_series_summed_over_labels_without_buckets():
    registry = CollectorRegistry()
    refusals = Counter("entente_refusals", "", ["kind"], registry=registry)
    refusals.labels("busy").inc(2)
    refusals.labels("malformed").inc(3)
    share = Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry)
    share.labels("0").set(0.25)
    share.labels("1").set(0.75)
    Histogram("entente_queue_seconds", "", registry=registry).observe(0.5)
    Gauge("python_gc", "", registry=registry).set(1)
    assert read_series(generate_latest(registry).decode()) == {
        "entente_refusals_total": 5.0,
        "vllm:kv_cache_usage_perc": 0.75,
        "entente_queue_seconds_count": 1.0,
        "entente_queue_seconds_sum": 0.5,
    }
    with pytest.raises(ValueError):
        read_series("<html>a proxy's page</html>")


@pytest.fixture
def pair(model: Path, tmp_path: Path, host: EngineHost) -> Iterator[Callable[..., tuple[RemoteEngine, list[WorkerHere]]]]:
    """Two workers and a pool over them: `pair(scrape_s=0.05, into=file)`."""
    opened: list[tuple[RemoteEngine, list[WorkerHere]]] = []

    def start(*, scrape_s: float, into: Path | None = None) -> tuple[RemoteEngine, list[WorkerHere]]:
        workers = [WorkerHere(PlainEngine(f"plain-{n}"), model, tmp_path).begin() for n in range(2)]
        settings = InferenceSettings(urls=tuple(worker.url for worker in workers))
        pool = RemoteEngine(settings, KEY, model_fingerprint(model), scraped_into=into, times=PoolTimes(scrape=scrape_s))
        host.submit(pool.start()).result(timeout=30)
        opened.append((pool, workers))
        return pool, workers

    yield start
    for pool, workers in opened:
        host.submit(pool.close()).result(timeout=30)
        for worker in workers:
            worker.stop()


def test_pages_are_read_on_the_beat_and_kept_for_sql_and_a_worker_that_is_gone_is_counted(pair, host: EngineHost, tmp_path: Path):
    paths = RunPaths(tmp_path / "run").create()
    pool, workers = pair(scrape_s=0.3, into=paths.workers)  # a page has a beat to come, on a busy machine too
    assert isinstance(pool, EngineWithWorkerFigures)
    wait_until(lambda: paths.workers.is_file() and len(paths.workers.read_text().splitlines()) >= 6)
    figures = pool.scraped()
    assert figures["workers/pages_read"] >= 6 and figures["workers/pages_unread"] == 0
    assert figures["workers/running_mean"] == 0 and set(figures) <= set(METRICS)
    workers[0].stop()
    found = dict.fromkeys(figures, 0.0)

    def gone() -> bool:
        for name, value in pool.scraped().items():
            found[name] += value
        return found["workers/pages_unread"] >= 2 and found["workers/pages_read"] >= 2

    wait_until(gone)
    lines = [json.loads(line) for line in paths.workers.read_text().splitlines()]
    assert {line["worker"] for line in lines} == {worker.url for worker in workers}
    later = [line for line in lines if line["worker"] == workers[1].url][1:]
    assert all("entente_requests_total" not in line for line in later), "a series is written where it changed"
    answer = ask(connect(paths.root), "SELECT DISTINCT worker, value FROM workers WHERE name = 'entente_requests_total'")
    assert sorted(answer["worker"].to_pylist()) == sorted(worker.url for worker in workers)


def test_what_workers_log_is_kept_once_by_worker_and_answers_sql(pair, host: EngineHost, tmp_path: Path):
    paths = RunPaths(tmp_path / "run").create()
    _, workers = pair(scrape_s=0.05, into=paths.workers)
    for number, worker in enumerate(workers):
        worker.log.emit(logging.LogRecord("vllm", logging.WARNING, "f", 1, "cache is %d %% full", (90 + number,), None))
    wait_until(lambda: paths.worker_log.is_file() and len(paths.worker_log.read_text().splitlines()) == 2)
    workers[0].log.emit(logging.LogRecord("vllm", logging.ERROR, "f", 1, "cache is full", (), None))
    wait_until(lambda: len(paths.worker_log.read_text().splitlines()) == 3)
    time.sleep(0.3)
    answer = ask(connect(paths.root), "SELECT worker, level, text FROM worker_log ORDER BY ALL").to_pylist()
    expected = [
        {"worker": workers[0].url, "level": "ERROR", "text": "vllm: cache is full"},
        {"worker": workers[0].url, "level": "WARNING", "text": "vllm: cache is 90 % full"},
        {"worker": workers[1].url, "level": "WARNING", "text": "vllm: cache is 91 % full"},
    ]
    assert sorted(answer, key=str) == sorted(expected, key=str), "each line once"


def test_gpus_of_a_worker_s_host_stand_on_its_page_and_reach_the_step(monkeypatch: pytest.MonkeyPatch):
    readings = {"0": {"utilisation": 0.25, "memory_share": 0.5, "power_w": 100.0}, "1": {"utilisation": 0.75, "power_w": 300.0}}

    class TwoGpus:
        def __len__(self) -> int:
            return 2

        def read(self) -> dict[str, dict[str, float]]:
            return readings

    monkeypatch.setattr(worker_metrics, "Nvml", TwoGpus)
    page = WorkerMetrics().text(EngineStats(), 0).decode()
    assert 'entente_gpu_utilisation{device="1"} 0.75' in page
    series = read_series(page)
    assert series["entente_gpu_utilisation"] == 0.75, "the busiest"
    assert series["entente_gpu_power_w"] == 400.0, "of all"
    scrape = WorkerScrape(1.0)
    scrape._readings.append(series)
    figures = scrape.take()
    assert figures["workers/gpu_utilisation_mean"] == 0.75 and figures["workers/gpu_memory_share_max"] == 0.5
    assert figures["workers/gpu_power_w"] == 400.0 and set(figures) <= set(METRICS)
    assert "workers/gpu_sm_occupancy_share" not in figures


def test_a_page_that_is_none_or_hangs_is_counted_and_hinders_no_other(host: EngineHost):
    async def read(url: str) -> str:
        if url == "hangs":
            await asyncio.sleep(60)
        return {"fine": "entente_running 3\n", "html": "<html>"}[url]

    async def some_beats() -> dict[str, float]:
        scrape = WorkerScrape(0.1)
        task = asyncio.create_task(scrape.run(lambda: ["fine", "html", "hangs"], read))
        await asyncio.sleep(0.35)
        task.cancel()
        return scrape.take()

    figures = host.submit(some_beats()).result(timeout=10)
    assert figures["workers/running_mean"] == 3 and figures["workers/pages_read"] >= 2
    assert figures["workers/pages_unread"] >= figures["workers/pages_read"] + 1
    assert "workers/kv_cache_share_max" not in figures, "what no page tells is not made up"
