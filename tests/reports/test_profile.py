"""A profile's stages add up, its samples count where they were taken, and what grew is told from what did not."""

import threading
import time
from pathlib import Path

import pytest

from reports.flame import flame_page
from reports.profile import fold_all, grown, hottest, room_of, rooms, shares
from telemetry.sampling import VARIABLE, Samples, read_samples, sampled

ROOT = Path(__file__).resolve().parent.parent.parent
BOARD = (f"{ROOT}/rollouts/fork.py:play_fork", f"{ROOT}/game/board.py:step", "/lib/python3.11/copy.py:copy")
IDLE = (f"{ROOT}/inference/host.py:_run", "/lib/python3.11/selectors.py:select", ":epoll.poll")
DRAWN = (f"{ROOT}/inference/host.py:_run", f"{ROOT}/inference/embedded.py:_step", "/x/site-packages/torch/nn.py:forward")


def test_samples_count_inside_of_the_windows_only():
    thread = Samples(name="engine", began=100.0, stacks=[BOARD, IDLE], samples=[(0, 1.0), (1, 2.0), (0, 1.0)])
    assert thread.folded([(100.0, 104.0)]) == {BOARD: 2.0, IDLE: 2.0}
    assert thread.folded([(100.5, 101.5), (103.75, 110.0)]) == {BOARD: 0.75, IDLE: 0.5}
    assert fold_all([thread, thread], [(0.0, 200.0)]) == {"engine": {BOARD: 4.0, IDLE: 4.0}}
    assert fold_all([thread], [(200.0, 300.0)]) == {}, "a thread that was not there has no graph"


def test_a_sample_belongs_to_the_innermost_of_our_rooms_unless_the_thread_waits():
    assert [room_of(stack) for stack in (BOARD, IDLE, DRAWN, ("/lib/x.py:f",))] == [
        "board and prompts", "waiting", "engine", "libraries"
    ]  # fmt: skip
    folded = {BOARD: 1.0, IDLE: 2.0, DRAWN: 5.0}
    assert rooms(folded) == {"engine": 5.0, "waiting": 2.0, "board and prompts": 1.0}
    assert hottest(folded) == {"inference/embedded.py:_step": 5.0, "game/board.py:step": 1.0}


def test_what_grew_is_a_share_beyond_the_tolerance_and_the_worst_comes_first():
    before = shares({"select": 1.0, "forward": 8.0, "save": 1.0})
    now = shares({"select": 1.0, "forward": 3.0, "save": 4.0, "publish": 2.0})
    assert [each.stage for each in grown(now, before, 0.05)] == ["save", "publish"]
    assert grown(now, before, 0.35) == [] and grown(before, before, 0.001) == []
    assert grown(now, before, 0.05)[0].sentence() == "save: 40.0% of the time, 10.0% in the baseline"


def test_a_thread_is_sampled_only_where_the_environment_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def busy_then_idle() -> None:
        with sampled("worker"):
            until = time.monotonic() + 0.15
            while time.monotonic() < until:
                sum(number * number for number in range(1000))
            time.sleep(0.15)

    busy_then_idle()
    assert read_samples(tmp_path) == []
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    began = time.time()
    threads = [threading.Thread(target=busy_then_idle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_samples(tmp_path)
    assert [thread.name for thread in found] == ["worker", "worker"], "each thread has samples of its own"
    for thread in found:
        folded = thread.folded([(began, time.time())])
        assert 0.25 < sum(folded.values()) <= time.time() - began
        assert any(stack[-1].endswith("sleep") and room_of(stack) == "waiting" for stack in folded)
        assert any("busy_then_idle" in frame for stack in folded for frame in stack)


def test_a_flame_graph_is_one_page_with_our_calls_by_name_and_libraries_by_theirs():
    page = flame_page("a <title>", {"engine": {BOARD: 1.0, IDLE: 1.0, DRAWN: 2.0, ("<b>:f",): 0.001}})
    assert "a &lt;title&gt;" in page and "<b>" not in page
    assert "engine: 4.00 s, 25% of it waiting" in page
    assert "inference/embedded.py: _step: 2.000 s, 50.0%" in page and "torch: 2.000 s" in page and "copy: 1.000 s" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
