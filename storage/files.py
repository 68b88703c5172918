"""The file store: publish, look up, list, open and remove files. Immutable files are written and mapped only through it.

A name is published once, complete and durable, or not at all. A second publication under the name changes nothing and returns
False. Another store (an object store with conditional put and a local copy to map) can implement `FileStore`. `FILES` is the
store in use: a POSIX file system, local or shared. A published file never changes, because a reader may have it mapped and a
truncated mapping kills the reader.
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
    """A store of immutable files. Names that begin with a dot are ignored."""

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        """Call `write` with a temporary path, then name that file `final` if the name is free.

        Returns False if the name was taken; the existing file is unchanged. If `write` raises, nothing is left behind.
        """
        ...

    def exists(self, path: Path | str) -> bool:
        """Whether a file of this name is published."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Names of the published files in a folder, in any order; none if there is no such folder."""
        ...

    def folders(self, parent: Path) -> list[str]:
        """Names of the folders in a folder, sorted; none if there is no such folder."""
        ...

    def open(self, path: Path) -> pa.NativeFile:
        """The file, opened for random access without a copy.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def remove(self, path: Path) -> None:
        """Remove the name, if it exists; whoever has the file open can still read it."""
        ...


class PosixFiles:
    """A POSIX file system: write to a temporary file, sync it, hard-link it to its name, sync the folder."""

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        make_directory(final.parent)
        temp = name_aside(final)
        try:
            write(temp)
        except BaseException:
            temp.unlink(missing_ok=True)  # leave no part of a file on a full disk
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
    """Open a regular file for reading; a pipe or device is refused at once.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def publish_file(temp: Path, final: Path) -> bool:
    """Name a finished file `final` if that name is free; False: another process was first, and its file is kept.

    A hard link, because a rename would silently replace a file that readers have mapped.
    """
    try:
        sync_file(temp)
        published = _link(temp, final)
    finally:
        temp.unlink()
    sync_directory(final.parent)
    return published


def _link(temp: Path, final: Path) -> bool:
    """Link if the name is free.

    A network file system may repeat a request whose answer was lost, and then report that the name is taken by this very link.
    The number of links shows that.
    """
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
    """Create `path` and its missing parents. Each parent is synced, because a crash could otherwise lose the files in it."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def name_aside(final: Path) -> Path:
    """A temporary name beside `final`: readers ignore it, and no two attempts share it."""
    return final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def is_running(pid: int) -> bool:
    """Whether this machine has a process `pid`, such as the one in a temporary name; True for a number too large to be one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def sync_file(path: Path) -> None:
    """Write the file's content to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Write the folder's names to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
