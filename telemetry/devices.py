"""Samples the GPUs of this machine. A machine without a GPU is reported once and gives no figures."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Self

from telemetry.cards import Card
from telemetry.nvml import Nvml, Reading

logger = logging.getLogger("entente.devices")

LARGEST_FILE = 32 << 20
"""Bytes of readings after which a new file begins."""
GPU_BEAT_S = 2.0
"""Seconds between two readings of the GPUs: tens of readings per step, at negligible cost."""


class GpuSampler:
    """Reads the GPUs of this machine regularly in its own thread; without a GPU, figures are empty."""

    def __init__(self, beat_s: float = 0.0, file: Path | None = None, cards: Sequence[Card] = ()) -> None:
        """Start reading.

        Args:
            beat_s: seconds between two readings; 0: none but one at each `sample`.
            file: takes each reading of a device as a line of JSON; bounded.
            cards: read these alone; none: all that are visible.
        """
        self._nvml, self._beat_s, self._file = Nvml(cards), beat_s, file
        self._readings: list[dict[str, Reading]] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if beat_s and len(self._nvml):
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def sample(self) -> dict[str, float]:
        """Registered `gpu/` figures from the readings since the last call, else from a new reading; {} without a GPU."""
        with self._lock:
            if not self._readings and len(self._nvml):
                self._read()
            readings, self._readings = self._readings, []
        return fold(readings)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._nvml.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s):
            with self._lock:
                self._read()

    def _read(self) -> None:
        reading = self._nvml.read()
        if not reading:
            return
        self._readings.append(reading)
        if self._file is None:
            return
        now = round(time.time(), 3)
        try:
            for device, figures in reading.items():
                line = {name: round(value, 4) for name, value in figures.items()}
                append_line(self._file, json.dumps({"time": now, "device": device, **line}))
        except OSError as error:  # a full disk is reported by the run; sampling continues
            logger.info("a reading of the GPUs was not written: %s", error)
            self._file = None


def append_line(file: Path, line: str, largest: int = LARGEST_FILE) -> None:
    """Append `line`; a file that has passed `largest` bytes becomes `<name>.before<ending>` first, in place of an older one."""
    if file.exists() and file.stat().st_size > largest:
        os.replace(file, file.with_suffix(f".before{file.suffix}"))
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")


def fold(readings: Sequence[Mapping[str, Reading]]) -> dict[str, float]:
    """Registered `gpu/` figures of some readings of all devices: means over time, of the device that a figure is about."""
    devices = sorted({device for reading in readings for device in reading})

    def over_time(name: str, fold: Callable[[list[float]], float] = mean) -> list[float]:
        """One value for each device that has it."""
        each = [[reading[device][name] for reading in readings if name in reading.get(device, {})] for device in devices]
        return [fold(values) for values in each if values]

    figures: dict[str, float] = {}
    for metric, name, in_time, of_devices in _FOLDS:
        if values := over_time(name, in_time):
            figures[f"gpu/{metric}"] = of_devices(values)
    return figures | ({"gpu/readings": float(len(readings))} if figures else {})


_FOLDS: tuple[tuple[str, str, Callable[[list[float]], float], Callable[[list[float]], float]], ...] = (
    ("utilisation", "utilisation", mean, max),
    ("utilisation_mean", "utilisation", mean, mean),
    ("memory_share", "memory_share", max, max),
    ("memory_used_mib", "memory_used_mib", max, sum),
    ("memory_busy_share", "memory_busy_share", mean, max),
    ("dram_bandwidth_share", "dram_bandwidth_share", mean, mean),
    ("sm_activity_share", "sm_activity_share", mean, mean),
    ("sm_occupancy_share", "sm_occupancy_share", mean, mean),
    ("tensor_share", "tensor_share", mean, mean),
    ("power_w", "power_w", mean, sum),
    ("sm_clock_mhz", "sm_clock_mhz", mean, min),
    ("memory_clock_mhz", "memory_clock_mhz", mean, min),
    ("temperature_c", "temperature_c", max, max),
)
"""Metric, figure of a reading, how readings of one device are combined, and how devices are combined."""
