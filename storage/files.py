"""The one small interface between this room and whatever keeps its files: publish, look for, list, open, remove.

Promise: a name is published once, whole and durable, or not at all; who comes second learns it, and what stands is untouched.
Whatever another store can do (an object store: a conditional put, and a local copy to map) can keep that promise behind
``FileStore``; nothing else here knows how. ``FILES`` is the store in use: a POSIX file system, local or shared.
Never: know what a file holds, or change a published one. A reader may have it mapped, and a truncated mapping kills the reader.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import pyarrow as pa


class FileStore(Protocol):
    """What immutable files need; paths are names, and a name that begins with a dot is nobody's."""

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        """Let ``write`` fill a file of its own, then name that ``final`` if the name is free.

        False: the name was taken, and what bears it stands. Whatever ``write`` raises leaves nothing behind.
        """
        ...

    def exists(self, path: Path | str) -> bool:
        """Whether a file of this name was published."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Names of the published files in a folder, in any order; none where there is no such folder."""
        ...

    def folders(self, parent: Path) -> list[str]:
        """Names of the folders in a folder, sorted; none where there is no such folder."""
        ...

    def open(self, path: Path) -> pa.NativeFile:
        """The file, for reading at random and without a copy; FileNotFoundError if it is absent."""
        ...

    def remove(self, path: Path) -> None:
        """Take the name away, if it is there; who has the file open keeps what it has."""
        ...


class PosixFiles:
    """Files on a POSIX file system: written aside, synced, hard-linked to their name, and the folder synced after it."""

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        make_directory(final.parent)
        temp = name_aside(final)
        try:
            write(temp)
        except BaseException:
            temp.unlink(missing_ok=True)  # a full disk must not be filled further by what could not be finished
            raise
        return publish_file(temp, final)

    def exists(self, path: Path | str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, folder: Path) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return [entry.name for entry in entries if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []

    def folders(self, parent: Path) -> list[str]:
        try:
            with os.scandir(parent) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        except FileNotFoundError:
            return []

    def open(self, path: Path) -> pa.NativeFile:
        return pa.memory_map(str(path))

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


FILES: FileStore = PosixFiles()
"""The store of every run."""


def open_regular(path: Path) -> BufferedReader:
    """A file, open for reading. A pipe or a device under its name is refused instead of being waited for.

    Raises:
        OSError: there is no such file, or it is no regular one.
    """
    # Without the flag, opening a pipe waits for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def publish_file(temp: Path, final: Path) -> bool:
    """Name a finished file ``final`` if that is free. False: another attempt was first, whose file stands.

    A hard link and not a rename, because a rename would silently replace what readers have already mapped.
    """
    try:
        sync_file(temp)
        published = _link(temp, final)
    finally:
        temp.unlink()
    sync_directory(final.parent)
    return published


def _link(temp: Path, final: Path) -> bool:
    """Link if absent. A network file system may repeat a request whose answer it lost, and then say that the name was taken, by
    the link itself: the number of links tells."""
    try:
        os.link(temp, final)
    except OSError as error:
        if os.stat(temp).st_nlink > 1 and os.path.samefile(temp, final):
            return True
        if isinstance(error, FileExistsError):
            return False
        raise
    return True


def make_directory(path: Path) -> None:
    """Make ``path`` and its missing parents; each is synced, else a crash could lose the files in it."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def name_aside(final: Path) -> Path:
    """A name beside ``final`` for content in the making: no reader considers it, no two attempts share it."""
    return final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync_file(path: Path) -> None:
    """Return once the file's content is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Return once the folder's names are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
