"""Garbage goes in a thread of its own, so that what its finalisers wait for stops nobody."""

import subprocess
import sys

PROGRAM = """
import threading, time
from cli import collect_aside
collect_aside.BEAT_S = 0.01
collect_aside.collect_aside()
class Held:
    def __init__(self): self.itself = self
    def __del__(self): where.append(threading.current_thread().name)
where = []
until = time.monotonic() + 20
while not where and time.monotonic() < until:
    Held()
    list(map(list, [[]] * 5000))
    time.sleep(0.01)
print(set(where))
"""


def test_what_is_collected_is_collected_aside():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'garbage'}"
