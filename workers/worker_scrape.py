"""The workers' Prometheus pages and logs, read on a beat: what happened at them between two steps, not only at the step's end.

Every worker has the same few series of ours; one over vLLM has vLLM's beside them, of which the key-value cache's use and the
queue are the ones that tell why it is slow. A page that cannot be read is counted and never an error: the pool notices by itself
when a worker is gone.
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
"""Bytes after which the file of readings begins anew; the one before is kept beside it."""
_RUNNING, _WAITING, _CACHE = "entente_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_GPU, _SUMMED = "entente_gpu_", ("entente_gpu_power_w", "entente_gpu_memory_used_mib")


def log_file_for(readings: Path) -> Path:
    """The file of the workers' log lines, beside that of their readings."""
    return readings.with_suffix(f".log{readings.suffix}")


def read_series(page: str) -> dict[str, float]:
    """Value by name of a page's series of ours and of vLLM's; labels are summed over, but of shares the largest counts,
    and so of what GPUs show, power and memory in use apart.

    Histograms keep their sum and count. Buckets, times of creation and other programs' series are left out.

    Raises:
        ValueError: the text is not in Prometheus's format.
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
    """Reads pages on a beat and keeps what a step is told of them; lives on one event loop."""

    def __init__(self, interval_s: float, file: Path | None = None) -> None:
        """Begin with nothing read.

        Args:
            interval_s: seconds between two readings of a worker, above 0.
            file: takes each reading as a line of JSON, of the series that changed since the worker's line before; what the
                workers log goes into the file of `log_file_for`.
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
        """Read the pages of `workers()` (addresses) by `read` on every beat, and by `log` what they logged, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.gather(*(self._read_page(worker, read) for worker in workers()))
            if log is not None and self._file is not None:
                await asyncio.gather(*(self._read_log(worker, log, log_file_for(self._file)) for worker in workers()))
            await asyncio.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))

    async def _read_page(self, worker: str, read: Callable[[str], Awaitable[str]]) -> None:
        try:
            series = read_series(await asyncio.wait_for(read(worker), self._interval_s))
        except Exception:  # whatever is wrong with a worker is the pool's to find and to say
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
            told = [
                (int(line["number"]), json.dumps({"worker": worker} | {name: line[name] for name in ("time", "level", "text")}))
                for line in lines
            ]
        except Exception:  # as with its page; one that knows no such route has no log to show
            return
        for number, line in told:
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
