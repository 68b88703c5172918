"""Memory of processes and figures of GPUs; an absent GPU is said once and costs nothing afterwards."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import psutil

logger = logging.getLogger("entente.devices")


def give_back_memory() -> None:
    """Return freed memory to the system: about a millisecond. Without it, a process that allocates and frees from several threads
    keeps ever more half-empty pages. Only glibc needs asking; elsewhere this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_mib(pid: int) -> float:
    """Resident memory of a process, MiB; 0 once it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


class GpuSampler:
    """Reads NVML through `pynvml`; empty figures where there is no GPU."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._devices: Sequence[object] = ()
        try:
            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            logger.info("no GPU figures: %s", error)

    def sample(self) -> dict[str, float]:
        """Registered `gpu/` metrics of this moment; {} without a GPU."""
        if not self._devices:
            return {}
        use = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in self._devices]
        memory = [self._nvml.nvmlDeviceGetMemoryInfo(device) for device in self._devices]
        power = [self._nvml.nvmlDeviceGetPowerUsage(device) / 1000 for device in self._devices]
        return {
            "gpu/utilisation": max(use),
            "gpu/memory_share": max(info.used / info.total for info in memory),
            "gpu/power_w": sum(power),
        }
