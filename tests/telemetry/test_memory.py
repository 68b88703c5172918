"""Memory of a process: read as the kernel does, given back, kept, and old objects left alone by collections."""

import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import psutil
import pytest

from entente.telemetry.memory import freeze_old_objects, give_back_memory, private_mib


def test_private_memory_is_what_the_kernel_says_without_pages_of_files(tmp_path: Path):
    def by_the_kernel() -> float:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) / 2**10

    assert private_mib(os.getpid()) == pytest.approx(by_the_kernel(), abs=8)
    (tmp_path / "library").write_bytes(b"1" * 2**26)
    before = private_mib(os.getpid())
    with (tmp_path / "library").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert sum(library[:: mmap.PAGESIZE]) and psutil.Process().memory_info().rss / 2**20 > before + 60
        assert private_mib(os.getpid()) == pytest.approx(before, abs=8)


def test_freed_memory_goes_back_to_the_system():
    """Many small pieces with a survivor among every thousand: free pages lie between them, and only asking returns them."""
    before = private_mib(os.getpid())
    pieces = [bytearray(3000) for _ in range(60_000)]
    full = private_mib(os.getpid())
    kept = pieces[::1000]
    del pieces
    give_back_memory()
    assert full - before > 100 and private_mib(os.getpid()) - before < 0.5 * (full - before), len(kept)


_ACTIVATIONS = """
import resource, sys
from entente.telemetry.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    for piece in [bytes(3_000_000) for _ in range(40)]:
        assert piece[0] == 0
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is asked")
def test_what_a_step_freed_is_there_for_the_next_one_without_the_kernel():
    faults = {
        way: int(subprocess.run([sys.executable, "-c", _ACTIVATIONS, way], capture_output=True, text=True, check=True).stdout)
        for way in ("given back", "kept")
    }
    assert faults["given back"] > 1_000 and faults["kept"] < 0.05 * faults["given back"], faults


def test_what_stood_before_is_out_of_collections_while_it_lasts_and_what_came_later_is_not():
    class Node:
        def __init__(self) -> None:
            self.itself = self

    ended: list[str] = []

    def cycle(name: str) -> None:
        node = Node()
        weakref.finalize(node, ended.append, name)

    before = gc.get_threshold()
    cycle("garbage from before")
    with freeze_old_objects():
        assert ended == ["garbage from before"], "it is collected, not frozen"
        assert gc.get_freeze_count() > 10_000
        cycle("garbage from inside")
        gc.collect()
        assert ended[1:] == ["garbage from inside"]
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == before
