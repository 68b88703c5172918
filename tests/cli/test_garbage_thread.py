"""Garbage is collected in its own thread, so that a finaliser that waits stops no other work."""

import subprocess
import sys

PROGRAM = """
import threading, time
from cli import serve_prefect
serve_prefect.BEAT_S = 0.01
serve_prefect.collect_in_thread()
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


def test_garbage_is_collected_in_its_own_thread():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'garbage'}"
