"""What a store of runs' files can do, and the store of every path: the interface behind `storage.files.FILES`.

A name is published once, complete and durable, or not at all. A second publication under the name changes nothing and returns
False. A published file never changes, because a reader may have it mapped. docs/extending.md says how to add a store.
"""

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa


class Hold(Protocol):
    """A folder whose growing files are copied into its store; see `FileStore.mirror`."""

    def flush(self) -> None:
        """Copy what has changed, and return when it is stored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder in a folder, unfinished and set-aside ones too. Links are left out."""

    path: Path
    is_folder: bool
    size: Callable[[], int]
    """Bytes of it, and of everything below it."""
    touched: Callable[[], float]
    """Latest write time of it and of everything below it, Unix seconds."""


class FileStore(Protocol):
    """A store of files. Names that begin with a dot are ignored."""

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        """Call `write` with a temporary path, then name that file `final` if the name is free.

        Returns False if the name was taken; the existing file is unchanged. If `write` raises, nothing is left behind.
        """
        ...

    def replace(self, path: Path, content: bytes, *, sole_writer: bool = False) -> None:
        """Replace the content of a small file. After a crash it has the old or the new content.

        Args:
            sole_writer: only one process may write this file; where the store can tell, another one's writing is an InputError.
        """
        ...

    def publish_folder(self, aside: Path, final: Path) -> None:
        """Name the complete local folder `aside` `final`.

        Raises:
            DataError: `final` exists.
        """
        ...

    def share(self, folder: Path) -> None:
        """Give other machines a folder that this one has made under its final name, unless they have it."""
        ...

    def exists(self, path: Path | str) -> bool:
        """Whether a file, or a folder with a file, of this name is published."""
        ...

    def existing(self, folder: Path, names: Iterable[str]) -> set[str]:
        """Which of these names are published in a folder."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Names of the published files in a folder, in any order; none if there is no such folder."""
        ...

    def folders(self, parent: Path) -> list[str]:
        """Names of the folders in a folder, sorted; none if there is no such folder."""
        ...

    def entries(self, folder: Path) -> list[Entry]:
        """Everything in a folder, sorted by name; none if there is no such folder."""
        ...

    def open(self, path: Path) -> pa.NativeFile:
        """The file, opened for random access without a copy.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def fetch(self, path: Path) -> Path:
        """`path`, with the newest content of that file on this machine.

        Raises:
            FileNotFoundError: there is no such file in a bucket; on a file system the caller's read raises it.
        """
        ...

    def fetch_folder(self, folder: Path) -> Path:
        """`folder`, with all files of that published folder on this machine."""
        ...

    def fetch_again(self, path: Path) -> bool:
        """Fetch a file or folder anew, after its copy on this machine was found damaged; whether its content is another now."""
        ...

    def refresh(self, folder: Path, below: Collection[str] = ()) -> None:
        """Bring the small files in a folder, and in its folders named in `below`, up to date on this machine."""
        ...

    def marks(self, path: Path | str) -> tuple[int, int] | None:
        """Size in bytes and write time in nanoseconds, which identify a file; None if it is missing."""
        ...

    def remove(self, path: Path) -> None:
        """Remove the name, if it exists; whoever has the file open can still read it."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder. A removal that is killed leaves no partial folder that counts as published."""
        ...

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged file or folder so that readers ignore it; returns the new path."""
        ...

    def held(self, lock: Path, wait_s: float = 0.0) -> AbstractContextManager[bool]:
        """Hold an exclusive lock during the block; yields False if another process has it.

        Args:
            wait_s: seconds to wait for the lock.
        """
        ...

    def is_held(self, lock: Path) -> bool:
        """Whether a process seems to hold the lock; for display."""
        ...

    def mirror(self, folder: Path) -> AbstractContextManager[Hold]:
        """During the block, let others see the files to which this process appends in a folder."""
        ...

    def check(self, folder: Path) -> None:
        """Check that runs can be written below a folder of runs.

        Raises:
            InputError: its store lacks what that needs.
        """
        ...


class MountedFiles:
    """The store of every path: that of the mounted folder that it lies in, else the file system."""

    def __init__(self, others: FileStore) -> None:
        """`others` is the store of all paths outside the mounted folders."""
        self.mounted: dict[str, FileStore] = {}
        """Absolute folder with a slash at its end -> the store of all paths below it."""
        self._others = others
        self._inherits = True

    def mount(self, folder: Path, store: FileStore) -> None:
        """Make `store` the store of every path below an absolute folder."""
        self._inherit()
        self.mounted[f"{folder}/"] = store

    def _inherit(self) -> None:
        """At first use, mount what the process that started this one had mounted."""
        if self._inherits:
            self._inherits = False
            if "ENTENTE_MOUNTS" in os.environ:
                from storage.run_roots import mount_inherited

                mount_inherited()

    def store_of(self, path: Path | str) -> FileStore:
        """The store of a path."""
        self._inherit()
        if self.mounted:
            inside = f"{path}/"
            for folder, store in self.mounted.items():
                if inside.startswith(folder):
                    return store
        return self._others

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        return self.store_of(final).publish(final, write)

    def replace(self, path: Path, content: bytes, *, sole_writer: bool = False) -> None:
        self.store_of(path).replace(path, content, sole_writer=sole_writer)

    def publish_folder(self, aside: Path, final: Path) -> None:
        self.store_of(final).publish_folder(aside, final)

    def share(self, folder: Path) -> None:
        self.store_of(folder).share(folder)

    def exists(self, path: Path | str) -> bool:
        return self.store_of(path).exists(path)

    def existing(self, folder: Path, names: Iterable[str]) -> set[str]:
        return self.store_of(folder).existing(folder, names)

    def names(self, folder: Path) -> list[str]:
        return self.store_of(folder).names(folder)

    def folders(self, parent: Path) -> list[str]:
        return self.store_of(parent).folders(parent)

    def entries(self, folder: Path) -> list[Entry]:
        return self.store_of(folder).entries(folder)

    def open(self, path: Path) -> pa.NativeFile:
        return self.store_of(path).open(path)

    def fetch(self, path: Path) -> Path:
        return self.store_of(path).fetch(path)

    def fetch_folder(self, folder: Path) -> Path:
        return self.store_of(folder).fetch_folder(folder)

    def fetch_again(self, path: Path) -> bool:
        return self.store_of(path).fetch_again(path)

    def refresh(self, folder: Path, below: Collection[str] = ()) -> None:
        self.store_of(folder).refresh(folder, below)

    def marks(self, path: Path | str) -> tuple[int, int] | None:
        return self.store_of(path).marks(path)

    def remove(self, path: Path) -> None:
        self.store_of(path).remove(path)

    def remove_folder(self, folder: Path) -> None:
        self.store_of(folder).remove_folder(folder)

    def set_aside(self, path: Path) -> Path:
        return self.store_of(path).set_aside(path)

    def held(self, lock: Path, wait_s: float = 0.0) -> AbstractContextManager[bool]:
        return self.store_of(lock).held(lock, wait_s)

    def is_held(self, lock: Path) -> bool:
        return self.store_of(lock).is_held(lock)

    def mirror(self, folder: Path) -> AbstractContextManager[Hold]:
        return self.store_of(folder).mirror(folder)

    def check(self, folder: Path) -> None:
        self.store_of(folder).check(folder)
