"""Figures of the machine: memory as the kernel counts it, and of GPUs nothing at all where there is none."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from telemetry.devices import GpuSampler, give_back_memory, resident_mib
from telemetry.metrics import check


def test_resident_memory_is_what_the_kernel_says():
    def by_the_kernel() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    assert resident_mib(os.getpid()) == pytest.approx(by_the_kernel(), abs=8)


def test_a_process_that_is_gone_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_mib(child.pid) == 0.0


def test_without_a_gpu_there_are_no_figures_and_no_error(monkeypatch: pytest.MonkeyPatch):
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert GpuSampler().sample() == {}


def test_of_several_gpus_the_busiest_the_fullest_and_the_power_of_all_are_told(monkeypatch: pytest.MonkeyPatch):
    cards = [
        SimpleNamespace(gpu=20, used=30, total=40, milliwatts=100_000),
        SimpleNamespace(gpu=90, used=10, total=80, milliwatts=250_500),
    ]
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": cards.__getitem__,
        "nvmlDeviceGetUtilizationRates": lambda card: card,
        "nvmlDeviceGetMemoryInfo": lambda card: card,
        "nvmlDeviceGetPowerUsage": lambda card: card.milliwatts,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    figures = GpuSampler().sample()
    check(figures)
    assert figures == {"gpu/utilisation": 0.9, "gpu/memory_share": 0.75, "gpu/power_w": 350.5}


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no NVIDIA GPU here")
def test_a_real_gpu_gives_figures_that_can_be():
    figures = GpuSampler().sample()
    check(figures)
    assert 0 <= figures["gpu/utilisation"] <= 1 and 0 < figures["gpu/memory_share"] <= 1 and figures["gpu/power_w"] > 0


def test_freed_memory_goes_back_to_the_system():
    """Many small pieces with a survivor among every thousand: free pages lie between them, and only asking returns them."""
    before = resident_mib(os.getpid())
    pieces = [bytearray(3000) for _ in range(60_000)]
    full = resident_mib(os.getpid())
    kept = pieces[::1000]
    del pieces
    give_back_memory()
    assert full - before > 100 and resident_mib(os.getpid()) - before < 0.5 * (full - before), len(kept)
