"""Who may join a trainer, and that it waits for nobody who does not fit: real sockets, without a process group."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from telemetry.errors import InputError, TrainingError
from training import follow, follower, leader
from training.follower import Wanted
from training.joining import Hello, Line, Offer, Place, as_message, program, read_address
from training.settings import TrainingSettings

HELLO = Hello(program=program(), host="gpu-2", local_rank=0)


class Leading:
    """A leader that gathers in a thread: its address, its log, and what it lost."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.lines: list[Line] = []
        self.lost: list[str] = []
        self.outcome: list[Any] = []
        monkeypatch.setattr(leader, "form_group", lambda store, **place: place)  # the group itself needs processes
        given = TrainingSettings.model_validate({"device": "cpu", "address": self.address, **settings})

        def gather() -> None:
            try:
                self.outcome.append(leader.gather_followers(model, given, "mine", self.lost.append))
            except Exception as error:
                self.outcome.append(error)

        self.thread = threading.Thread(target=gather, daemon=True)
        self.thread.start()

    def connect(self) -> Line:
        deadline = time.monotonic() + 20
        while True:
            try:
                self.lines.append(Line(socket.create_connection(read_address(self.address))))
                return self.lines[-1]
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the leader does not listen"
                time.sleep(0.02)

    def answer(self, hello: Hello) -> tuple[Line, dict]:
        line = self.connect()
        line.send(as_message(hello))
        return line, line.receive(20)

    def join(self, hello: Hello) -> Line:
        line, offer = self.answer(hello)
        assert Offer(**offer).run == "mine"
        line.send({"ready": True})
        return line


@pytest.fixture
def lead(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Leading]]:
    """`lead(2)` is a leader that waits for two processes elsewhere."""
    made: list[Leading] = []

    def make(elsewhere: int) -> Leading:
        made.append(Leading(model, monkeypatch, processes_elsewhere=elsewhere))
        return made[-1]

    yield make
    for leading in made:
        for line in leading.lines:
            line.close()


@pytest.fixture
def one_elsewhere(lead: Callable[[int], Leading]) -> Leading:
    return lead(1)


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        pytest.param(replace(HELLO, program="entente 0, torch 1"), "install the same here as there", id="another program"),
        pytest.param(replace(HELLO, run="other"), "trains run 'mine', not 'other'", id="wrong run"),
        pytest.param(replace(HELLO, key="guess"), "wants another key: set ENTENTE_KEY", id="wrong key"),
    ],
)
def test_who_does_not_fit_is_refused_in_a_sentence_and_takes_no_place(
    lead: Callable[[int], Leading], monkeypatch: pytest.MonkeyPatch, hello: Hello, sentence: str
):
    monkeypatch.setenv("ENTENTE_KEY", "secret")
    leading = lead(1)
    _, answer = leading.answer(hello if hello.key else replace(hello, key="secret"))
    assert sentence in answer["refused"]
    place = Place(**leading.join(replace(HELLO, key="secret", run="mine")).receive(20))
    assert (place.rank, place.size) == (1, 2)


def test_who_is_silent_or_no_follower_or_leaves_keeps_nobody_out(lead: Callable[[int], Leading]):
    leading = lead(2)
    leading.connect()  # and says nothing
    with socket.create_connection(read_address(leading.address)) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
    leading.join(replace(HELLO, host="gone")).close()
    lines = []
    while len(lines) < 2:
        line, answer = leading.answer(HELLO)
        if "refused" in answer:  # the end of the one that left is not noticed yet
            time.sleep(0.05)
            continue
        line.send({"ready": True})
        lines.append(line)
    assert {line.receive(20)["rank"] for line in lines} == {1, 2}
    leading.thread.join(20)
    assert leading.outcome[0]["size"] == 3 and not leading.lost


def test_ranks_are_those_of_neighbours_on_one_machine(lead: Callable[[int], Leading]):
    """So that processes that split a base are on one machine."""
    leading = lead(4)
    joined = [leading.join(replace(HELLO, host=host, local_rank=rank)) for host, rank in (("b", 1), ("a", 0), ("b", 0), ("a", 1))]
    places = [Place(**line.receive(20)) for line in joined]
    assert [place.rank for place in places] == [2, 3, 1, 4] and len({place.token for place in places}) == 1


@pytest.mark.parametrize("words", ["", "TrainingError: no memory"])
def test_a_follower_that_is_lost_is_told_in_one_sentence(one_elsewhere: Leading, words: str):
    line = one_elsewhere.join(HELLO)
    line.receive(20)
    if words:
        line.send({"failed": words})
    line.close()
    deadline = time.monotonic() + 20
    while not one_elsewhere.lost and time.monotonic() < deadline:
        time.sleep(0.02)
    (sentence,) = one_elsewhere.lost
    assert sentence.startswith("the trainer ends, because one of its 2 processes, process 0 on gpu-2, ")
    assert (f"failed: {words}" if words else "ended or cannot be reached") in sentence


def test_a_leader_whose_followers_do_not_come_says_so(lead: Callable[[int], Leading], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "JOIN_S", 0.2)
    leading = lead(2)
    leading.thread.join(20)
    (error,) = leading.outcome
    assert isinstance(error, TrainingError)
    assert "0 of 2 other processes joined" in str(error) and "`torchrun -m training.follow`" in str(error)


# -- addresses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["10.0.0.1", ":29500", "10.0.0.1:70000"])
def test_what_is_no_address_is_refused(address: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InputError, match=r"is no address of a trainer: give HOST:PORT"):
        read_address(address)
    with pytest.raises(SystemExit) as ended:
        follow.main([address])
    assert ended.value.code == 2 and "give HOST:PORT" in capsys.readouterr().err


def own_addresses() -> list[str]:
    found = (one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET)
    return [address for address in found if not address.startswith("127.")]


@pytest.mark.parametrize("address", ["0.0.0.0:29500", "192.0.2.1:29500"])
def test_an_address_that_followers_cannot_use_is_refused(address: str):
    with pytest.raises(InputError, match=rf"training\.address {address} (is every|cannot be listened on)"):
        leader._listen(TrainingSettings(address=address), has_key=True)


@pytest.mark.skipif(not own_addresses(), reason="this machine has only its loopback address")
def test_an_address_in_a_network_needs_a_key():
    with socket.create_server((own_addresses()[0], 0)) as free:
        address = f"{own_addresses()[0]}:{free.getsockname()[1]}"
    settings = TrainingSettings(address=address)
    with pytest.raises(InputError, match="is reached over the network: set ENTENTE_KEY"):
        leader._listen(settings, has_key=False)
    leader._listen(settings, has_key=True).close()


# -- the follower's side ---------------------------------------------------------------------------------------------------


@pytest.fixture
def both_ends() -> Iterator[tuple[Line, Line]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Line(socket.create_connection(server.getsockname()))
        other = Line(server.accept()[0])
    yield one, other
    one.close()
    other.close()


OFFER = Offer(run="mine", model="/nowhere", base="0" * 16, device="cpu", threads=1, settings={})
WANTED = Wanted(address="127.0.0.1:29500")


def test_a_follower_with_another_base_does_not_join(both_ends: tuple[Line, Line], model: Path):
    line, leaders = both_ends
    with pytest.raises(InputError, match=r"trains the base model 0000000000000000, but '.*' is [0-9a-f]{16} here"):
        follower._find_base(line, replace(WANTED, model=str(model)), OFFER)
    assert "failed" in leaders.receive(5)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b'{"run": "mine"}\n'])
def test_what_is_no_trainer_is_told_as_such(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
        other.sendall(answer)
        with pytest.raises(InputError, match=r"what answers at 127\.0\.0\.1:29500 is no trainer of this program"):
            follower._ask(line, WANTED)
        other.close()
        line.close()


def test_the_program_is_its_code_and_its_libraries(tmp_path: Path):
    (tmp_path / "training").mkdir()
    code = tmp_path / "training" / "loss.py"
    code.write_text("x = 1\n")
    before = program(tmp_path)
    assert before == program(tmp_path) and "torch " in before
    code.write_text("x = 2\n")
    assert program(tmp_path) != before


@pytest.mark.parametrize(("codes", "begun"), [([0, 1, -9, 2], 4), ([2], 1)])
def test_a_follower_is_begun_again_for_the_next_trainer_until_it_is_refused(
    codes: list[int], begun: int, monkeypatch: pytest.MonkeyPatch
):
    started: list[dict] = []

    def run(words: list[str], **_: object) -> object:
        started.append(json.loads(words[-1]))
        return type("Done", (), {"returncode": codes[len(started) - 1]})

    monkeypatch.setattr(follow.subprocess, "run", run)
    monkeypatch.setattr(follow, "_AGAIN_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert follow.main(["127.0.0.1:29500", "--run", "mine", "--model", "m"]) == 2
    assert len(started) == begun
    assert started[0]["local_rank"] == 5 and started[0]["run"] == "mine" and started[0]["model"] == "m"
