"""A profile's stages add up, its samples count where they were taken, and what grew is told from what did not."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from reports.profile import grown, hottest, room_of, rooms, shares, write_flame_graphs
from telemetry.sampling import VARIABLE, read_samples, sampled, seconds_by_stack

ROOT = Path(__file__).resolve().parent.parent.parent
BOARD = (f"{ROOT}/rollouts/fork.py:play_fork", f"{ROOT}/game/board.py:step", "/lib/python3.11/copy.py:copy")
IDLE = (f"{ROOT}/inference/host.py:_run", "/lib/python3.11/selectors.py:select", ":epoll.poll")
DRAWN = (f"{ROOT}/inference/host.py:_run", f"{ROOT}/inference/embedded.py:_step", "/x/site-packages/torch/nn.py:forward")


def kept(folder: Path, thread: str, *samples: tuple[tuple[str, ...], float]) -> None:
    """A file of samples that began at 100 s."""
    frames = [
        ([f"{frame.rpartition(':')[2]}\0{frame.rpartition(':')[0] or '<built-in>'}\0001" for frame in stack], s)
        for stack, s in samples
    ]
    about = {"start_time": 100.0, "duration": 4.0, "sample_count": len(frames), "start_call_stack": [""], "cpu_time": 1.0}
    (folder / f"{thread}.json").write_text(json.dumps(about | {"target_description": "", "frame_records": frames}))


def test_samples_count_inside_of_the_windows_only(tmp_path: Path):
    kept(tmp_path, "engine-1", (BOARD, 1.0), (IDLE, 2.0), (BOARD, 1.0))

    def found(*windows: tuple[float, float]) -> dict:
        return {name: seconds_by_stack(session) for name, session in read_samples(tmp_path, windows).items()}

    assert found((100.0, 104.0)) == {"engine": {BOARD: 2.0, IDLE: 2.0}}
    assert found((100.5, 101.5), (103.75, 110.0)) == {"engine": {BOARD: 0.75, IDLE: 0.5}}
    assert found((200.0, 300.0)) == {}, "a thread that was not there has no graph"
    kept(tmp_path, "engine-2", (BOARD, 1.0))
    assert found((0.0, 200.0)) == {"engine": {BOARD: 3.0, IDLE: 2.0}}, "threads of one name are put together"


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
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    began = time.time()
    threads = [threading.Thread(target=busy_then_idle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.glob("worker-*.json"))) == 2, "each thread has samples of its own"
    folded = seconds_by_stack(read_samples(tmp_path, [(began, time.time())])["worker"])
    assert 0.5 < sum(folded.values()) <= 2 * (time.time() - began)
    assert any(stack[-1].endswith("sleep") and room_of(stack) == "waiting" for stack in folded)
    assert any("busy_then_idle" in frame for stack in folded for frame in stack)


def test_each_thread_has_a_page_with_our_calls_that_loads_nothing_from_elsewhere(tmp_path: Path):
    kept(tmp_path, "engine-1", (BOARD, 1.0), (DRAWN, 2.0))
    kept(tmp_path, "trainer-1", (IDLE, 1.0))
    pages = write_flame_graphs(read_samples(tmp_path, [(0.0, 200.0)]), tmp_path / "profile-e2e.json")
    assert {name: page.name for name, page in pages.items()} == {
        "engine": "profile-e2e-engine.html", "trainer": "profile-e2e-trainer.html"
    }  # fmt: skip
    page = pages["engine"].read_text()
    assert "inference/embedded.py" in page and "_step" in page and "epoll" not in page
    assert "http" not in re.sub(r"(?s)<script>.*?</script>", "", page), "the page loads nothing from elsewhere"
