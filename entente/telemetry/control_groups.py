"""Limits on cores and memory that the control groups of this process set: of a container, a Slurm job, a systemd unit.

A group's limit holds for all groups below it, so each group from the process's own to the root counts. Both versions of Linux's
control groups are read; https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/ beside it name the files.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allowed_cores(of_machine: int) -> int:
    """`of_machine` cores, or fewer if a quota of CPU time is lower; a part of a core does not count, but there is always one."""
    quotas = [(quota, period) for group in _groups("cpu") for quota, period in _cpu_quotas(group) if quota > 0]  # -1: none
    return min([of_machine, *(max(1, quota // period) for quota, period in quotas)])


def available_memory(of_machine: int) -> int:
    """`of_machine` bytes, or less if a limit leaves less."""
    return min([of_machine, *(max(0, left) for group in _groups("memory") for left in _memory_left(group))])


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, from its own to the root."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controller if controllers else ROOT  # version 2 names no controllers
        # A container may see its own group as the root, and the path of the host, or one with "..": then there is no such folder.
        own = root if ".." in path else root / path.lstrip("/")
        yield own
        yield from (group for group in own.parents if group.is_relative_to(root))


def _cpu_quotas(group: Path) -> Iterator[tuple[int, int]]:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
        except (OSError, ValueError):  # another version, or "max": no limit
            continue
        yield quota, period


def _memory_left(group: Path) -> Iterator[int]:
    """The file cache counts as used, but the kernel frees it on demand."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left = int((group / limit).read_text()) - int((group / used).read_text()) + int(stat.get(cache, 0))
        except (OSError, ValueError):  # another version, or "max": no limit
            continue
        yield left
