"""The files of runs: published once, whole or not at all, also where a file system has no hard links or lies about them."""

import errno
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from entente.telemetry.errors import DataError, InputError
from storage.files import (
    entries_in,
    file_lock,
    folders_in,
    make_directory,
    names_in,
    publish_directory,
    publish_once,
    write_output,
)
from storage.runs import check_name, check_runs_root


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def _links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with hard links, and one without."""

    def refuses(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not request.param:
        monkeypatch.setattr(os, "link", refuses)


@pytest.mark.usefixtures("_links")
def test_the_first_to_publish_a_name_keeps_it(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "name"
    assert publish_once(final, lambda temp: temp.write_bytes(b"first")) is True
    assert publish_once(final, lambda temp: temp.write_bytes(b"second")) is False
    assert final.read_bytes() == b"first" and [path.name for path in final.parent.iterdir()] == ["name"]
    assert folders_in(tmp_path) == ["deep"] and names_in(tmp_path / "nowhere") == folders_in(tmp_path / "no") == []


@pytest.mark.usefixtures("_links")
def test_one_of_many_that_publish_a_name_at_once_is_told_so(tmp_path: Path) -> None:
    final, start, won = tmp_path / "name", threading.Barrier(8), []

    def race(content: bytes) -> None:
        start.wait()
        if publish_once(final, lambda temp: temp.write_bytes(content)):
            won.append(content)

    racers = [threading.Thread(target=race, args=(b"%d" % each * 1000,)) for each in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert won == [final.read_bytes()] and [path.name for path in tmp_path.iterdir()] == ["name"]


def test_what_cannot_be_finished_leaves_nothing_and_the_name_free(tmp_path: Path) -> None:
    def full(temp: Path) -> None:
        temp.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish_once(tmp_path / "name", full)
    assert list(tmp_path.iterdir()) == []
    assert publish_once(tmp_path / "name", lambda temp: temp.write_bytes(b"whole"))


@pytest.mark.parametrize("error", [FileExistsError(17, "exists"), OSError(5, "lost")], ids=["taken", "no answer"])
def test_a_link_that_was_made_though_its_answer_says_otherwise_counts_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """As a network file system may do that sends a request twice."""
    link = os.link

    def lies(source: Path, target: Path) -> None:
        link(source, target)
        raise error

    monkeypatch.setattr(os, "link", lies)
    assert publish_once(tmp_path / "final", lambda temp: temp.write_bytes(b"mine")) is True
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_link_that_failed_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(OSError, match="Input/output"):
        publish_once(tmp_path / "final", lambda temp: temp.write_bytes(b"mine"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is when it is mounted without flock: two flows could otherwise train one run."""

    def refuses(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(InputError, match="file locks"), file_lock(tmp_path / ".lock"):
        pass


@pytest.mark.parametrize(
    ("root", "cure"),
    [
        pytest.param("s3://bucket/runs", "mount the store", id="an address"),
        pytest.param("~/runs", "write the whole path", id="a home that no shell put in its place"),
        pytest.param("file/below", "--runs-root", id="below a file"),
        pytest.param("gone", "mount that disk", id="a link to a disk that is not mounted"),
        pytest.param("gone/below/it", "mount that disk", id="below such a link"),
        pytest.param("loop", "fix the link", id="a link to itself"),
        pytest.param("/proc/none", "--runs-root", id="where nobody can write"),
    ],
)
def test_a_folder_of_runs_that_cannot_be_written_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, cure: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("gone").symlink_to(tmp_path / "nothing")
    Path("loop").symlink_to("loop")
    with pytest.raises(InputError, match=cure):
        check_runs_root(Path(root))
    with pytest.raises(InputError, match="mount that disk"):
        make_directory(Path("gone"))


def test_a_full_disk_is_noticed_and_a_folder_that_can_be_written_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    for folder in ("none/yet", "link", "link/none/yet", "odd ?#%41'ü[x]"):
        check_runs_root(tmp_path / folder, "mine")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "other"]

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"No space left on device.*--runs-root"):
        check_runs_root(tmp_path / "other")


def test_a_file_is_synced_before_it_is_named_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, link = os.fsync, os.link

    def log_sync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def log_link(source: Path, target: Path) -> None:
        events.append(f"link {target.name}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "link", log_link)
    publish_once(tmp_path / "final", lambda temp: temp.write_bytes(b"x"))
    assert [event.partition(".final.")[0] for event in events] == ["sync ", "link final", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("occupied", [True, False], ids=["full", "empty"])
def test_a_published_folder_is_never_replaced(tmp_path: Path, occupied: bool) -> None:
    (tmp_path / "temp" / "deep").mkdir(parents=True)
    (tmp_path / "temp" / "deep" / "file").write_bytes(b"new")
    publish_directory(tmp_path / "temp", tmp_path / "free")
    assert (tmp_path / "free" / "deep" / "file").read_bytes() == b"new"
    (tmp_path / "taken").mkdir()
    if occupied:
        (tmp_path / "taken" / "file").write_bytes(b"old")
    with pytest.raises(DataError, match="taken"):
        publish_directory(tmp_path / "free", tmp_path / "taken")
    assert not (tmp_path / "taken" / "deep").exists()


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a b", "/root"])
def test_a_name_that_leaves_the_run_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="producer"):
        check_name(name, "The producer")


def test_who_waited_for_a_lock_whose_folder_was_removed_gets_that_of_the_new_folder(tmp_path: Path):
    lock, got = tmp_path / "run" / ".lock", []

    def wait() -> None:
        with file_lock(lock, wait_s=20) as mine, file_lock(lock) as somebody_else:
            got.append((mine, somebody_else))

    waiting = threading.Thread(target=wait)
    with file_lock(lock) as mine:
        assert mine
        waiting.start()
        time.sleep(0.3)  # by then it waits for this file
        shutil.rmtree(lock.parent)
    waiting.join(timeout=30)
    assert got == [(True, False)]


def test_what_a_user_names_as_output_is_written_whole_and_a_link_or_pipe_stays_one(tmp_path: Path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    write_output(link, b"one")
    with file.open("rb") as before:
        write_output(link, lambda out: out.write(b"other"))
        assert (before.read(), file.read_bytes(), link.is_symlink()) == (b"one", b"other", True)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"page")
    assert os.read(reader, 10) == b"page" and pipe.is_fifo()
    os.close(reader)


def test_what_another_process_removes_meanwhile_has_no_size_and_was_touched_just_now(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("left", "folder/gone"):
        (tmp_path / file).write_text("four")
    folder, left = entries_in(tmp_path)
    (gone,) = entries_in(folder.path)
    (tmp_path / "folder" / "gone").unlink()
    assert (gone.size(), gone.touched() > time.time()) == (0, True)
    assert (left.size(), left.touched() <= time.time()) == (4, True)
