"""A flow whose worker was killed goes on without its output, whichever thread writes next."""

import os
import subprocess
import sys

FLOW = """
import sys, threading, time
from rich.console import Console
from flows.recovery.outlive_worker import outlive_worker

outlive_worker()
console, ended = Console(file=sys.stderr), []
sys.stdin.readline()  # by now nobody reads what is written

def write():
    for _ in range(3):
        console.print("a step is done")
        print("and so it is", flush=True)
    ended.append(True)

thread = threading.Thread(target=write)
thread.start()
thread.join()
write()
sys.exit(7 if len(ended) == 2 else 1)
"""


def ends(**environment: str) -> int:
    """Exit code of a process whose output is closed before it writes."""
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT__FLOW_RUN_ID"}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", FLOW], stdin=pipe, stdout=pipe, stderr=pipe, env=kept | environment)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stderr.close()
    process.stdin.write(b"go on\n")
    process.stdin.close()
    return process.wait(timeout=60)


def test_a_flow_that_a_worker_started_outlives_it():
    assert ends(PREFECT__FLOW_RUN_ID="00000000-0000-0000-0000-000000000000") == 7


def test_every_line_reaches_the_worker_up_to_the_last():
    program = (
        "from flows.recovery.outlive_worker import outlive_worker\n"
        "outlive_worker(); outlive_worker()\n"
        "for number in range(20_000): print(number)\n"
        "import sys; print('last', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PREFECT__FLOW_RUN_ID": "any"},
        check=True,
    )
    assert done.stdout.splitlines() == [str(number) for number in range(20_000)] and done.stderr == "last\n"
