"""The files of runs: published once, replaced, listed, locked and removed, in a local or shared folder (docs/operations.md).

A final name always has complete content: written under a temporary name that readers ignore (leading dot, trailing `.tmp`),
synced and renamed; then the folder is synced. A published file never changes in place, because a reader may have it mapped.
"""

import errno
import fcntl
import hashlib
import math
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from entente.telemetry.errors import DataError, InputError

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_LOCKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
_LINK_S = 60.0
_PIECE = 2**22


def publish_once(final: Path, write: Callable[[Path], object]) -> bool:
    """Call `write` with a temporary path, then hard-link that file as `final`; False, without a change, if the name is taken.
    A rename would silently replace a file that readers have mapped. If `write` raises, nothing is left behind."""
    make_directory(final.parent)
    temp = name_aside(final)
    try:
        write(temp)
        sync_file(temp)
        published = _link_if_free(temp, final)
    finally:
        temp.unlink(missing_ok=True)  # leave no part of a file on a full disk
    sync_directory(final.parent)
    return published


def _link_if_free(temp: Path, final: Path) -> bool:
    """A network file system may repeat a request whose answer was lost, and then report the name as taken by this very link;
    the link count shows that."""
    try:
        os.link(temp, final)
    except OSError as error:
        if os.stat(temp).st_nlink > 1 and os.path.samefile(temp, final):
            return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno in _NO_LINKS:
            return _rename_if_free(temp, final)
        raise
    return True


def _rename_if_free(temp: Path, final: Path) -> bool:
    lock = final.with_name(f".{final.name}.lock")
    with file_lock(lock, wait_s=_LINK_S) as mine:
        if not mine:
            raise DataError(f"{final} could not be published within {_LINK_S:.0f} s: another process holds {lock}; stop it")
        if free := not final.exists():
            os.rename(temp, final)
        lock.unlink()
    return free


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, published after the block as by `publish_directory`; if the block raises, nothing is left behind."""
    make_directory(final.parent)
    aside = name_aside(final)
    aside.mkdir()
    try:
        yield aside
        publish_directory(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish_directory(aside: Path, final: Path) -> None:
    """Sync the complete folder `aside` and rename it to `final`; raises DataError if `final` exists."""
    for folder, _, files in os.walk(aside):
        for file in files:
            sync_file(Path(folder, file))
        sync_directory(Path(folder))
    # rename replaces an empty folder silently; it refuses a full one
    if final.exists():
        raise DataError(f"{final} exists and is never overwritten; remove it, if nothing needs it.")
    try:
        os.rename(aside, final)
    except OSError as error:
        if not final.exists():
            raise
        raise DataError(f"{final} was published by another process meanwhile; only one of the two may go on.") from error
    sync_directory(final.parent)


def durable_write(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace the content of a file, not its mode. After a crash, or if `content` raises, it has the old or the new content."""
    aside = name_aside(path)
    try:
        with aside.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
        with suppress(FileNotFoundError):
            shutil.copymode(path, aside)
        sync_file(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)  # leave no part of a file on a full disk
    sync_directory(path.parent)


def write_output(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file that a user names, whole or not at all. A link, pipe or terminal stays one."""
    if path.is_fifo() or path.is_char_device():
        with path.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
    else:
        durable_write(path.resolve(), content)


def write_measured(path: Path, content: bytes | BinaryIO) -> dict[str, int | str]:
    """Write a file; returns its size and SHA-256 as manifests have them, computed from what is written and not read again."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(content):
            digest.update(piece)
            size += file.write(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(content: bytes | BinaryIO) -> Iterator[bytes | memoryview]:
    if isinstance(content, bytes):
        view = memoryview(content)
        yield from (view[first : first + _PIECE] for first in range(0, len(view), _PIECE))
    else:
        while piece := content.read(_PIECE):
            yield piece


def names_in(folder: Path) -> list[str]:
    """Published names in a folder, in any order; none without the folder."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


def folders_in(parent: Path) -> list[str]:
    """Sorted names of the folders in a folder; none without the folder."""
    try:
        with os.scandir(parent) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    path: Path
    is_folder: bool

    def size(self) -> int:
        """Bytes of a file, or of all files below a folder, without links."""
        if self.is_folder:
            return _bytes_below(self.path)
        try:
            status = self.path.lstat()
        except FileNotFoundError:  # another process renamed or removed it
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def touched(self) -> float:
        """Latest write time of it and everything below it, Unix seconds; infinity if something was removed just now."""
        try:
            return max([self.path.lstat().st_mtime, *(entry.touched() for entry in entries_in(self.path))])
        except FileNotFoundError:
            return math.inf


def entries_in(folder: Path) -> list[Entry]:
    """Everything in a folder except links, also unfinished and set-aside files, sorted by name; none without the folder."""
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            known = sorted((Path(each.path), each.is_dir(follow_symlinks=False)) for each in entries if not each.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Entry(path=path, is_folder=is_folder) for path, is_folder in known]


def _bytes_below(folder: Path | str) -> int:
    """Without objects for its entries, because a long run has tens of thousands."""
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for each in entries:
            if each.is_dir(follow_symlinks=False):
                total += _bytes_below(each.path)
            else:
                with suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def file_marks(path: Path | str) -> tuple[int, int] | None:
    """Size in bytes and write time in nanoseconds, which identify a file; None if it is missing."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns


def remove_folder(folder: Path) -> None:
    """Rename, then remove a folder, so that a killed removal leaves no partial folder under its name."""
    aside = name_aside(folder)
    os.rename(folder, aside)
    shutil.rmtree(aside)


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder so that readers ignore it; returns the new path."""
    aside = path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")
    os.rename(path, aside)
    sync_directory(path.parent)
    return aside


@contextmanager
def file_lock(lock: Path, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold an exclusive lock during the block; yields False if another process has it after `wait_s` seconds.

    A kernel lock (flock), released at process exit. It works between machines if the file system supports that; otherwise the
    step's ledger stops the second trainer.
    """
    until = time.monotonic() + wait_s
    while True:
        make_directory(lock.parent)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        mine = _try_lock(lock, handle, until)
        if not mine or _names(lock, handle):
            break
        os.close(handle)  # The holder removed the file: lock the file that now has the name.
    try:
        yield mine
    finally:
        os.close(handle)


def _try_lock(lock: Path, handle: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise InputError(f"the file system of '{lock}' has no file locks: mount it with them (Lustre: -o flock)") from error


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_held(lock: Path) -> bool:
    """Whether a process holds the lock. Tests with a shared lock that is released at once."""
    if not lock.is_file():
        return False
    with lock.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_writable(folder: Path, setting: str) -> None:
    """Check that files can be written in `folder`, or where it will be created, without leftovers. Raises InputError that
    names folder, fault, and `setting`, which selects another folder."""
    place = folder.absolute()
    while not place.exists():
        _check_link(place)
        place = place.parent
    if not place.is_dir():
        raise InputError(f"'{place}' is not a folder: name another one with {setting}")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"cannot write in '{place}' ({error.strerror}): fix that, or name another folder with {setting}"
        ) from error


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise InputError(f"'{path}' is a link to '{path.readlink()}', which does not exist: mount that disk, or fix the link")


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, and sync each parent, because a crash could otherwise lose the files in it."""
    if path.is_dir():
        return
    _check_link(path)
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def name_aside(final: Path) -> Path:
    """A unique temporary name beside `final` that readers ignore."""
    return final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
