"""A file that a user names is read only if it is a regular file of bounded size."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import read_regular, read_text


def listening(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(file))


MAKE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": listening,
    "link to a device": lambda file: file.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "missing": lambda file: None,
}


@pytest.mark.parametrize("what", MAKE)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, what: str):
    MAKE[what](file := tmp_path / "f")
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


def test_a_link_is_followed(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", at_most=9, what="file") == b"text"
