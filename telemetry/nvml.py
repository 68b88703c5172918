"""What NVML reports about the GPUs that this process may use: one reading of all of them at a time, through `pynvml`.

A device's name is its UUID, as in `telemetry.cards`; a slice of a card in MIG mode is a device of its own.

A figure that a device does not give is missing from its reading; it is never zero. Once in a process a sentence says that the
machine has no NVML, or that a device lacks the hardware counters of NVML's GPM (Hopper and later have them). This module changes
nothing of a device and keeps no reading.
"""

from collections.abc import Callable, Sequence
from typing import Any

from telemetry.cards import Card, visible_cards
from telemetry.progress import reporter

Reading = dict[str, float]
"""A device's figures by name, those of FIGURES that it gives."""
FIGURES = {
    "utilisation": "share of the time in which a kernel ran",
    "memory_share": "memory in use, of all",
    "memory_used_mib": "memory in use, MiB",
    "memory_busy_share": "share of the time in which memory was read or written",
    "power_w": "power, W",
    "sm_clock_mhz": "clock of the multiprocessors, MHz",
    "memory_clock_mhz": "clock of the memory, MHz",
    "temperature_c": "temperature, degrees Celsius",
    "dram_bandwidth_share": "memory bandwidth used, of what the device has; by GPM",
    "sm_activity_share": "multiprocessors at work, of all; by GPM",
    "sm_occupancy_share": "warps in flight, of those that would fit; by GPM",
    "tensor_share": "share of the time in which tensor cores computed; by GPM",
}
"""Figures of a reading and their meaning."""
_BY_GPM = {
    "sm_activity_share": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_share": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "dram_bandwidth_share": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "tensor_share": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
}
_said: set[str] = set()


class Nvml:
    """The devices that this process may use; none without NVML."""

    def __init__(self, cards: Sequence[Card] = ()) -> None:
        """`cards`: read these alone; none: all that are visible."""
        import pynvml

        self._nvml: Any = pynvml
        self._devices: list[_Device] = []
        try:
            pynvml.nvmlInit()
            cards = tuple(dict.fromkeys(cards)) or visible_cards(pynvml)
            handles = [pynvml.nvmlDeviceGetHandleByUUID(card.uuid) for card in cards]
        except pynvml.NVMLError as error:
            _say_once(f"there are no figures of GPUs here: {error}")
            return
        self._devices = [_Device(pynvml, card, handle) for card, handle in zip(cards, handles, strict=True)]
        without = [device.name for device in self._devices if not device.has_counters]
        if without:
            _say_once(
                f"{', '.join(without)} does not tell occupancy and bandwidth: NVML's hardware counters (GPM) "
                "need Hopper or later, and no MIG"
            )

    def __len__(self) -> int:
        return len(self._devices)

    def read(self) -> dict[str, Reading]:
        """The current figures of each device, by its UUID. GPM figures cover the time since the previous reading."""
        readings = {device.name: device.read() for device in self._devices}
        return {name: reading for name, reading in readings.items() if reading}

    def close(self) -> None:
        """Free the samples. NVML stays initialised, because other code of this process may use it."""
        for device in self._devices:
            device.close()
        self._devices = []


class _Device:
    def __init__(self, nvml: Any, card: Card, handle: object) -> None:
        self._nvml, self.name, self._handle = nvml, card.uuid, handle
        self._samples: list[Any] = []
        self._sampled = False
        try:
            # A slice's counters need its card's handle and its instance; they are not read.
            if not card.mig and nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        except nvml.NVMLError:  # the driver is older than the counters
            pass

    @property
    def has_counters(self) -> bool:
        return bool(self._samples)

    def read(self) -> Reading:
        nvml, handle, found = self._nvml, self._handle, {}

        def ask(what: Callable[[], Reading]) -> None:
            try:
                found.update(what())
            except nvml.NVMLError:  # not supported, or the device is lost: the figure is missing
                return

        def use() -> Reading:
            rates = nvml.nvmlDeviceGetUtilizationRates(handle)
            return {"utilisation": rates.gpu / 100, "memory_busy_share": rates.memory / 100}

        def memory() -> Reading:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return {"memory_share": info.used / info.total, "memory_used_mib": info.used / 2**20}

        ask(use)
        ask(memory)
        ask(lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})
        ask(lambda: {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))})
        ask(lambda: {"memory_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))})
        ask(lambda: {"temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))})
        if self._samples:
            ask(self._counters)
        return found

    def _counters(self) -> Reading:
        """The hardware counters between the previous sample and a new one; empty for the first sample."""
        nvml, (before, now) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._handle, now)
        self._samples.reverse()
        if not self._sampled:
            self._sampled = True
            return {}
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = len(_BY_GPM)
        wanted.sample1, wanted.sample2 = before, now
        for place, metric in enumerate(_BY_GPM.values()):
            wanted.metrics[place].metricId = getattr(nvml, metric)
        metrics_read = nvml.nvmlGpmMetricsGet(wanted)
        answers = zip(_BY_GPM, metrics_read.metrics[: len(_BY_GPM)], strict=True)
        return {name: answer.value / 100 for name, answer in answers if answer.nvmlReturn == nvml.NVML_SUCCESS}

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        reporter().say(sentence)
