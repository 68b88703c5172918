"""A signal ends a command with its sentence and its code, whatever the main thread is doing, and nothing outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from entente.cli.run_flow import run_in_thread

CASES = [(signal.SIGINT, 130, "entente: interrupted\n"), (signal.SIGTERM, 143, "entente: ended by SIGTERM\n")]
OPEN = """
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
"""
HOLDS_ON = """
word = "begun"
while True:
    try:
        print(word, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        word = "closing"
"""


@pytest.fixture
def command() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for each in started:
        with each:
            each.kill()


def begun(command: list[subprocess.Popen[str]], work: str, first: str = "") -> subprocess.Popen[str]:
    """The command line, in a process that ignores SIGINT from the start, with `work`, which says so, in place of a command."""
    program = textwrap.dedent("""
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import subprocess, sys, time
        from entente.cli import end_by_signal, main
        {first}
        def work(*_, **__):
            {work}
        main._call = work
        main.main()
    """).format(first=first, work=textwrap.indent(work.strip(), " " * 4).lstrip())
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command.append(process)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize(("number", "code", "sentence"), CASES, ids=["SIGINT", "SIGTERM"])
def test_a_signal_closes_what_is_open_and_ends_with_its_sentence_and_code(command, number: int, code: int, sentence: str):
    process = begun(command, OPEN + "    print('closed')")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (code, "closed\n", sentence)


def test_what_cannot_be_closed_in_time_is_ended_with_its_stopped_children(command):
    child = "child = subprocess.Popen(['sleep', '600']); child.send_signal(signal.SIGSTOP)\n"
    process = begun(command, child + HOLDS_ON, first="end_by_signal.ENDS_WITHIN_S = 0.3")
    (stopped,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (143, "closing\n", "entente: ended by SIGTERM\n")
    assert psutil.wait_procs([stopped], timeout=10)[1] == []


def test_a_second_signal_ends_it_at_once_but_not_one_that_came_with_the_first(command):
    process = begun(command, HOLDS_ON)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "closing\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1.3)
    assert process.poll() is None, "a wrapping script sent it along with the first"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "entente: ended by SIGTERM\n"
    assert process.returncode == 143


def test_a_command_that_is_done_and_does_not_go_away_is_ended_too(command):
    late = "lambda: (time.sleep(0.5), print('begun', flush=True), time.sleep(60))"
    process = begun(command, f"import threading; threading.Thread(target={late}).start()")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[1] == "entente: ended by SIGTERM\n"
    assert process.returncode == 143


def test_a_flow_gives_its_result_its_error_and_the_context_of_the_command():
    async def work(fails: bool) -> str:
        assert threading.current_thread() is not threading.main_thread(), "where Prefect would take over SIGTERM"
        if fails:
            raise ValueError("no")
        return "done"

    assert run_in_thread(work(fails=False)) == "done"
    with pytest.raises(ValueError, match="no"):
        run_in_thread(work(fails=True))


def test_an_interrupted_flow_is_cancelled_and_waited_for():
    closed = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            closed.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_thread(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed == [True]
