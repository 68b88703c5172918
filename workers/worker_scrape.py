"""Reads the workers' Prometheus pages and logs at regular intervals, also between steps.

Every worker has the series of this project; one with vLLM also has vLLM's, of which cache use and queue length explain most slow
workers. A page that cannot be read is counted and is not an error, because the pool detects lost workers itself.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from telemetry.bounded_file import append_line

OURS, VLLMS = "entente_", "vllm:"
LARGEST_FILE = 32 << 20
"""Size at which a new file of readings is begun, bytes; the previous file is kept."""
_RUNNING, _WAITING, _CACHE = "entente_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_GPU, _SUMMED = "entente_gpu_", ("entente_gpu_power_w", "entente_gpu_memory_used_mib")


def log_file_for(readings: Path) -> Path:
    """The file for the workers' log lines, next to the file of their readings."""
    return readings.with_suffix(f".log{readings.suffix}")


def read_series(page: str) -> dict[str, float]:
    """Values of this project's and vLLM's series on a page, by name.

    Values of different labels are added. For shares and GPU series, except power and memory in use, the largest is kept.
    Histograms keep their sum and count. Buckets, creation times and other series are left out.

    Raises:
        ValueError: `page` is not in Prometheus's text format.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name
            if not name.startswith((OURS, VLLMS)) or name.endswith(("_bucket", "_created")):
                continue
            if name.endswith("_perc") or (name.startswith(_GPU) and name not in _SUMMED):
                found[name] = max(found.get(name, 0.0), sample.value)
            else:
                found[name] = found.get(name, 0.0) + sample.value
    return found


class WorkerScrape:
    """Reads pages at regular intervals and keeps the readings until a step takes them; used on one event loop."""

    def __init__(self, interval_s: float, file: Path | None = None) -> None:
        """Create a reader without readings.

        Args:
            interval_s: seconds between two readings of a worker, above 0.
            file: file for readings, one JSON line each with the series that changed since the worker's previous line; the
                workers' log lines go to `log_file_for(file)`.
        """
        self._interval_s, self._file = interval_s, file
        self._previous: dict[str, dict[str, float]] = {}
        self._logged: dict[str, int] = {}
        self._pages_unread = 0
        self._readings: list[dict[str, float]] = []

    async def run(
        self,
        workers: Callable[[], Iterable[str]],
        read: Callable[[str], Awaitable[str]],
        log: Callable[[str, int], Awaitable[list[dict[str, Any]]]] | None = None,
    ) -> None:
        """Read the pages of `workers()` (addresses) with `read`, and their logs with `log`, every interval until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.gather(*(self._read_page(worker, read) for worker in workers()))
            if log is not None and self._file is not None:
                await asyncio.gather(*(self._read_log(worker, log, log_file_for(self._file)) for worker in workers()))
            await asyncio.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))

    async def _read_page(self, worker: str, read: Callable[[str], Awaitable[str]]) -> None:
        try:
            series = read_series(await asyncio.wait_for(read(worker), self._interval_s))
        except Exception:  # counted only: the pool detects and reports a failing worker
            self._pages_unread += 1
            return
        self._readings.append(series)
        if self._file is not None:
            before = self._previous.get(worker, {})
            changed = {name: value for name, value in series.items() if before.get(name) != value}
            self._previous[worker] = series
            line = {"time": round(time.time(), 3), "worker": worker, **changed}
            await asyncio.to_thread(append_line, self._file, json.dumps(line), LARGEST_FILE)

    async def _read_log(self, worker: str, log: Callable[[str, int], Awaitable[list[dict[str, Any]]]], file: Path) -> None:
        after = self._logged.get(worker, 0)
        try:
            lines = await asyncio.wait_for(log(worker, after), self._interval_s)
            numbered = [
                (int(line["number"]), json.dumps({"worker": worker} | {name: line[name] for name in ("time", "level", "text")}))
                for line in lines
            ]
        except Exception:  # see `_read_page`; an older worker has no such route
            return
        for number, line in numbered:
            await asyncio.to_thread(append_line, file, line, LARGEST_FILE)
            self._logged[worker] = number

    def take(self) -> dict[str, float]:
        """Registered `workers/` figures since the last call."""
        readings, self._readings, unread, self._pages_unread = self._readings, [], self._pages_unread, 0
        figures = {"pages_read": float(len(readings)), "pages_unread": float(unread)}
        for name, series, fold in (
            ("running_mean", _RUNNING, _mean),
            ("waiting_mean", _WAITING, _mean),
            ("waiting_max", _WAITING, max),
            ("kv_cache_share_max", _CACHE, max),
            ("gpu_utilisation_mean", _GPU + "utilisation", _mean),
            ("gpu_memory_share_max", _GPU + "memory_share", max),
            ("gpu_sm_occupancy_share", _GPU + "sm_occupancy_share", _mean),
            ("gpu_dram_bandwidth_share", _GPU + "dram_bandwidth_share", _mean),
            ("gpu_power_w", _GPU + "power_w", _mean),
        ):
            values = [reading[series] for reading in readings if series in reading]
            if values:
                figures[name] = fold(values)
        return {f"workers/{name}": value for name, value in figures.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
