"""A file that a user names is read only if it is a regular file of bounded size."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.telemetry.errors import DataError, InputError
from entente.telemetry.read_file import read_regular, read_text


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def listening(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "s"))
    return folder / "s"


def device(folder: Path) -> Path:
    return Path("/dev/zero")


def link_to_device(folder: Path) -> Path:
    (folder / "link").symlink_to("/dev/zero")
    return folder / "link"


def directory(folder: Path) -> Path:
    return folder


def missing(folder: Path) -> Path:
    return folder / "missing"


@pytest.mark.parametrize("make", [fifo, listening, device, link_to_device, directory, missing], ids=lambda make: make.__name__)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], Path]):
    file = make(tmp_path)
    with pytest.raises(InputError, match=f"settings file '{file}' cannot be read: "):
        read_text(file, at_most=100, what="settings file")


def test_a_file_is_read_up_to_its_bound_and_as_text_only(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_text(file, at_most=100, what="file") == "x" * 100
    assert read_text(file, at_most=1 << 50, what="file") == "x" * 100, "a generous bound takes no memory"
    with pytest.raises(InputError, match="it has more than 99 bytes"):
        read_text(file, at_most=99, what="file")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        read_text(file, at_most=99, what="file")


def test_a_link_is_followed_only_where_that_is_allowed(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", at_most=9, what="file") == b"text"
    with pytest.raises(DataError, match="symbolic link"):
        read_regular(tmp_path / "link", at_most=9, what="file", follow_links=False, error=DataError)
