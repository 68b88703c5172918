"""Copies of objects on this machine: which version each is, and how many are kept.

A copy has the object's etag in an extended attribute, so every process knows which version it is. Where the file system has no
such attributes, a copy is fetched again by each process.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from storage.objects import Meta

NEVER_CHANGE = (".arrow", ".parquet", ".safetensors")
"""Endings of the large files, which are published once."""
GROW = (".jsonl", ".log")
"""Endings of the files to which one process appends."""
_YOUNG_S = 3600.0
"""Copies younger than this stay in the cache, because an engine may be about to load them."""
_UNFINISHED = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
_ETAG = "user.entente.etag"


def trim(cache: Path, gigabytes: float) -> int:
    """Remove the copies that were fetched longest ago while they take more than `gigabytes`; returns the bytes freed.

    Models and positions stay, and so do copies of the last hour. A file that somebody has mapped stays readable. What a killed
    process left unfinished goes too.
    """
    copies = []
    for file in cache.rglob("*"):
        if _UNFINISHED.fullmatch(file.name):
            with suppress(FileNotFoundError, IsADirectoryError):
                if time.time() - file.stat().st_ctime > _YOUNG_S:
                    file.unlink()
            continue
        shared = file.relative_to(cache).parts[0].startswith("_")
        if file.suffix in NEVER_CHANGE and not shared and not file.name.startswith(".") and etag_of(file):
            with suppress(FileNotFoundError):
                found = file.stat()
                copies.append((found.st_ctime, found.st_size, file))
    over, freed = sum(size for _, size, _ in copies) - gigabytes * 1e9, 0
    for fetched, size, file in sorted(copies):
        if over <= freed or time.time() - fetched < _YOUNG_S:
            break
        file.unlink(missing_ok=True)
        freed += size
    return freed


def keep(temp: Path, path: Path, etag: str, meta: Meta | None = None) -> None:
    """Make a complete temporary file the copy of an object."""
    set_etag(temp, etag)
    if meta is not None:
        os.utime(temp, ns=(meta.written_ns, meta.written_ns))
    os.replace(temp, path)


def set_etag(path: Path, etag: str, size: int | None = None) -> None:
    """Note which version of its object a file is.

    Args:
        size: bytes of that version; None: of the file.
    """
    with suppress(OSError, AttributeError):  # the file system, or the system, has no extended attributes
        os.setxattr(path, _ETAG, f"{etag} {path.stat().st_size if size is None else size}".encode())


def etag_of(path: Path) -> str:
    """The etag of a copy; empty if it is unknown."""
    return _noted(path)[0]


def is_unchanged(path: Path) -> bool:
    """Whether nothing was appended to a copy since."""
    etag, size = _noted(path)
    return bool(etag) and path.stat().st_size == size


def _noted(path: Path) -> tuple[str, int]:
    try:
        etag, _, size = os.getxattr(path, _ETAG).decode().rpartition(" ")
        return etag, int(size)
    except (OSError, AttributeError, ValueError):
        return "", -1


def is_copy(path: Path, meta: Meta) -> bool:
    """Whether a local file is the copy of this version of an object. One to which somebody appends counts as long as its object
    has not changed."""
    if not meta.etag or etag_of(path) != meta.etag:
        return False
    return path.suffix in GROW or path.stat().st_size == meta.size
