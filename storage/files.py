"""The files of runs: `FILES` publishes, replaces, finds, opens, locks and removes them, wherever a run lies.

`PosixFiles` is a file system, local or shared. A path below a mounted bucket (`storage/run_roots.py`) belongs to
`storage/bucket.py` instead. `storage/file_store.py` says what each call promises.
"""

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import pyarrow as pa

from storage.file_store import Entry, Hold, MountedFiles
from telemetry.errors import DataError, InputError


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

    def replace(self, path: Path, content: bytes, *, sole_writer: bool = False) -> None:
        aside = name_aside(path)
        try:
            aside.write_bytes(content)
            sync_file(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)  # leave no part of a file on a full disk
        sync_directory(path.parent)

    def publish_folder(self, aside: Path, final: Path) -> None:
        for folder, _, files in os.walk(aside):
            for file in files:
                sync_file(Path(folder, file))
            sync_directory(Path(folder))
        # rename replaces an empty folder silently; it refuses a full one
        if final.exists():
            raise DataError(f"{final} exists and is never overwritten; remove it, or use another number.")
        try:
            os.rename(aside, final)
        except OSError as error:
            if not final.exists():
                raise
            raise DataError(f"{final} was published by another process meanwhile; only one of the two may go on.") from error
        sync_directory(final.parent)

    def share(self, folder: Path) -> None:
        pass

    def exists(self, path: Path | str) -> bool:
        return self.marks(path) is not None

    def existing(self, folder: Path, names: Iterable[str]) -> set[str]:
        within = f"{folder}/"  # a string: to build a Path for each name would cost more than the stat
        return {name for name in names if self.exists(f"{within}{name}")}

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

    def entries(self, folder: Path) -> list[Entry]:
        if folder.is_symlink():
            return []
        try:
            with os.scandir(folder) as found:
                known = sorted((Path(each.path), each.is_dir(follow_symlinks=False)) for each in found if not each.is_symlink())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            Entry(path=path, is_folder=is_folder, size=lambda path=path: _size(path), touched=lambda path=path: _touched(path))
            for path, is_folder in known
        ]

    def open(self, path: Path) -> pa.NativeFile:
        return pa.memory_map(str(path))

    def fetch(self, path: Path) -> Path:
        return path

    def fetch_folder(self, folder: Path) -> Path:
        return folder

    def fetch_again(self, path: Path) -> bool:
        return False

    def refresh(self, folder: Path, below: Collection[str] = ()) -> None:
        pass

    def marks(self, path: Path | str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size, found.st_mtime_ns

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        aside = name_aside(folder)  # renamed first, so that no reader sees half of it
        os.rename(folder, aside)
        shutil.rmtree(aside)

    def set_aside(self, path: Path) -> Path:
        aside = hidden_name(path)
        os.rename(path, aside)
        sync_directory(path.parent)
        return aside

    @contextmanager
    def held(self, lock: Path, wait_s: float = 0.0) -> Iterator[bool]:
        """The lock is the kernel's (flock): it ends with the process that holds it, and works between processes of one machine.
        Between machines the ledger prevents two trainers."""
        until = time.monotonic() + wait_s
        while True:
            make_directory(lock.parent)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            mine = _try_lock(handle, until)
            if not mine or _names(lock, handle):
                break
            os.close(handle)  # The holder removed the file; the lock must be on the file that has the name now.
        try:
            yield mine
        finally:
            os.close(handle)

    def is_held(self, lock: Path) -> bool:
        """Tested with a shared lock that is released at once."""
        if not lock.is_file():
            return False
        with lock.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @contextmanager
    def mirror(self, folder: Path) -> Iterator[Hold]:
        yield SharedFolder()

    def check(self, folder: Path) -> None:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not there.is_dir():
            raise InputError(f"'{there}' is no folder, so runs cannot be written below it: name another one with --runs-root")


class SharedFolder:
    """A folder that readers see as it is."""

    def flush(self) -> None:
        """See `Hold.flush`."""


POSIX = PosixFiles()
"""The files of this machine and of shared file systems."""

FILES = MountedFiles(POSIX)
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


def hidden_name(path: Path) -> Path:
    """A name for a damaged file or folder, which readers ignore."""
    return path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")


def machine() -> str:
    """Identifies where a pid is valid: host name, boot and pid namespace."""
    try:
        boot, numbers = Path("/proc/sys/kernel/random/boot_id").read_text()[:8], os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {boot} {numbers}"


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 for links."""
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode):
        return sum(entry.size() for entry in POSIX.entries(path))
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _touched(path: Path) -> float:
    return max([path.lstat().st_mtime, *(entry.touched() for entry in POSIX.entries(path))])


def _names(path: Path, handle: int) -> bool:
    """Whether `path` is still a name of the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
