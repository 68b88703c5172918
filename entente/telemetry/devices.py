"""GPU readings from NVML every few seconds, stored in a file and aggregated over a step.

A device is named by its UUID; a MIG slice is its own device. An unsupported figure is missing, never zero."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Self

import pynvml as untyped_pynvml

from entente.telemetry.cards import Card, unusable_cards, visible_cards
from entente.telemetry.progress import reporter

pynvml: Any = untyped_pynvml
logger = logging.getLogger("entente.devices")
Reading = dict[str, float]

LARGEST_FILE = 32 << 20
"""Bytes; a larger file is rotated."""
GPU_BEAT_S = 2.0
"""Tens of readings per step, at negligible cost."""


class GpuSampler:
    """Reads the GPUs in its own thread; without one, figures are empty."""

    def __init__(self, beat_s: float = 0.0, file: Path | None = None, cards: Sequence[Card] = ()) -> None:
        """`beat_s` 0: one reading per `sample`. `file`: a JSON line per reading, bounded. `cards` empty: all visible ones."""
        self._devices, self._beat_s, self._file = _open_devices(cards), beat_s, file
        self._readings: list[dict[str, Reading]] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if beat_s and self._devices:
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def sample(self) -> dict[str, float]:
        """`gpu/` metrics over the readings since the last call, else from a new one; {} without a GPU."""
        with self._lock:
            if not self._readings:
                self._read()
            readings, self._readings = self._readings, []
        return fold(readings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread. NVML stays initialised: other code of this process may use it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s):
            with self._lock:
                self._read()

    def _read(self) -> None:
        reading = {name: figures for name, handle in self._devices.items() if (figures := read_device(handle))}
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
        except OSError as error:  # the run reports a full disk; sampling continues
            logger.info("a reading of the GPUs was not written: %s", error)
            self._file = None


def _open_devices(cards: Sequence[Card]) -> dict[str, Any]:
    """By UUID. Reports cards without a handle."""
    handles = dict[str, Any]()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        reporter().say(f"no GPU metrics: {error}")
        return handles
    without = [f"{sentence}: `nvidia-smi` says more" for sentence in unusable_cards(pynvml)]
    for card in cards or visible_cards(pynvml):
        try:
            handles[card.uuid] = pynvml.nvmlDeviceGetHandleByUUID(card.uuid)
        except pynvml.NVMLError as error:
            without.append(f"{card.text} gives no figures ({error})")
    for sentence in without:
        reporter().say(sentence)
    return handles


def read_device(handle: Any) -> Reading:
    reading = Reading()

    def use() -> Reading:
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        return {"utilisation": rates.gpu / 100, "memory_busy_share": rates.memory / 100}

    def memory() -> Reading:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if not info.total:
            return {}
        return {"memory_share": int(info.used) / int(info.total), "memory_used_mib": int(info.used) / 2**20}

    for ask in (
        use,
        memory,
        lambda: {"power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {"sm_clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))},
        lambda: {"temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))},
    ):
        try:
            reading |= ask()
        except pynvml.NVMLError:  # not supported, or the device is lost: the figure is missing
            continue
    return reading


def append_line(file: Path, line: str, largest: int = LARGEST_FILE) -> None:
    """Above `largest` bytes, first rename to `<name>.before<ending>`, replacing an older one."""
    if file.exists() and file.stat().st_size > largest:
        os.replace(file, file.with_suffix(f".before{file.suffix}"))
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")


Fold = Callable[[list[float]], float]
_FOLDS: tuple[tuple[str, str, Fold, Fold], ...] = (
    ("utilisation", "utilisation", mean, max),
    ("utilisation_mean", "utilisation", mean, mean),
    ("memory_share", "memory_share", max, max),
    ("memory_used_mib", "memory_used_mib", max, sum),
    ("memory_busy_share", "memory_busy_share", mean, max),
    ("power_w", "power_w", mean, sum),
    ("sm_clock_mhz", "sm_clock_mhz", mean, min),
    ("temperature_c", "temperature_c", max, max),
)
"""Metric, figure, aggregate over a device's readings, aggregate over devices."""


def fold(readings: Sequence[Mapping[str, Reading]]) -> dict[str, float]:
    devices, figures = sorted({device for reading in readings for device in reading}), dict[str, float]()
    for metric, name, over_time, over_devices in _FOLDS:
        each = [[reading[device][name] for reading in readings if name in reading.get(device, {})] for device in devices]
        if values := [over_time(some) for some in each if some]:
            figures[f"gpu/{metric}"] = over_devices(values)
    return figures | ({"gpu/readings": float(len(readings))} if figures else {})
