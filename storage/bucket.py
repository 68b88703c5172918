"""A run in an object store: the second implementation of `FileStore`.

A folder of runs in a bucket has a local folder, its *cache*. Code goes on using paths in that folder; this module maps a path to
the key of its object. The bucket holds the truth; the cache holds copies, which may be deleted at any time when no run writes.

- Publishing is a conditional put, then a copy in the cache. A folder is published with its manifest last, by a conditional put.
- Files that never change (`copies.NEVER_CHANGE`) are fetched when they are opened and then mapped as local ones. All others are
  small: `fetch` and `refresh` ask for a newer version.
- Files that grow (figures, logs) are written locally and copied every few seconds (`storage/mirror.py`).
- A lock is the kernel's, for processes of this machine, and a lease for all machines.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from storage.copies import GROW, NEVER_CHANGE, etag_of, is_copy, keep, set_etag, trim
from storage.files import POSIX, Entry, Hold, hidden_name, make_directory, name_aside
from storage.lease import Lease, is_alive
from storage.mirror import Mirror, locked, not_mirrored
from storage.objects import Meta, Objects
from telemetry.errors import DataError, InputError
from telemetry.progress import reporter

_FILE_ENDINGS = (*NEVER_CHANGE, *GROW, ".json")
LAST = ("manifest.json", "recipe.json")
"""The file of a folder that is published last, so that the folder is whole when it exists."""
_CACHE_VARIABLE = "ENTENTE_CACHE_GB"
_CACHE_GB = 20.0
_TRIM_EVERY = 256 << 20
"""Bytes fetched between two looks at the size of the cache."""
_SIDE_BY_SIDE = 8


class BucketFiles:
    """The files below one folder of runs in a bucket. Any thread may call."""

    def __init__(self, objects: Objects, prefix: str, cache: Path) -> None:
        """Args:
        prefix: of all keys, without a slash at its end.
        cache: absolute path of the local folder that stands for it.
        """
        self.objects, self._prefix, self._cache = objects, prefix, cache
        self._known: dict[str, Meta] = {}
        self._own: dict[str, str] = {}  # key -> etag of what this process wrote last
        self._listed: set[str] = set()
        self._lost: list[tuple[Path, str]] = []
        self._fetched = _TRIM_EVERY  # so that the first fetch looks

    def publish(self, final: Path, write: Callable[[Path], object]) -> bool:
        """See `FileStore.publish`."""
        self._check_held(final)
        make_directory(final.parent)
        temp = name_aside(final)
        try:
            write(temp)
            etag = self.objects.create(self.key(final), temp)
            if etag is None:
                return False
            keep(temp, final, etag)
            return True
        finally:
            temp.unlink(missing_ok=True)

    def replace(self, path: Path, content: bytes, *, sole_writer: bool = False) -> None:
        """See `FileStore.replace`."""
        self._check_held(path)
        key = self.key(path)
        if sole_writer and key in self._own:
            etag = self.objects.update(key, content, self._own[key])
            if etag is None:
                raise InputError(
                    f"another process has written '{path}' since this one did: it works on the run now, so this one stops"
                )
        else:
            etag = self.objects.overwrite(key, content)
        self._own[key] = etag
        make_directory(path.parent)
        temp = name_aside(path)
        try:
            temp.write_bytes(content)
            keep(temp, path, etag)
        finally:
            temp.unlink(missing_ok=True)

    def publish_folder(self, aside: Path, final: Path) -> None:
        """See `FileStore.publish_folder`."""
        self._check_held(final)
        if self.objects.head(f"{self.key(final)}/{_last_of(aside)}") is not None:
            raise DataError(f"{final} exists and is never overwritten; remove it, or use another number.")
        if not self._upload(aside, final):
            raise DataError(f"{final} was published by another process meanwhile; only one of the two may go on.")
        if final.is_dir():
            shutil.rmtree(final)  # a part of a copy
        os.rename(aside, final)

    def share(self, folder: Path) -> None:
        """See `FileStore.share`."""
        if self.objects.head(f"{self.key(folder)}/{_last_of(folder)}") is None:
            self._upload(folder, folder)  # False: another process shares an equal one

    def _upload(self, folder: Path, final: Path) -> bool:
        """Write the files of a local folder as `final`, the last one by a conditional put; False if that one exists."""
        last = folder / _last_of(folder)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != last]

        def put(file: Path) -> None:
            set_etag(file, self.objects.overwrite(f"{self.key(final)}/{file.relative_to(folder).as_posix()}", file))

        _side_by_side(put, files)
        etag = self.objects.create(f"{self.key(final)}/{last.name}", last)
        if etag is None:
            return False
        set_etag(last, etag)
        return True

    def exists(self, path: Path | str) -> bool:
        """See `FileStore.exists`."""
        key = self.key(path)
        found = self.objects.head(key)
        if found is None:
            self._known.pop(key, None)
            return Path(path).suffix not in _FILE_ENDINGS and any(True for _ in self.objects.below(f"{key}/"))
        self._known[key] = found
        return True

    def existing(self, folder: Path, names: Iterable[str]) -> set[str]:
        """See `FileStore.existing`."""
        wanted = set(names)
        if not wanted:
            return set()
        prefix, first = f"{self.key(folder)}/", min(wanted)
        # The key just before the first wanted one: every key that sorts after it is listed.
        after = prefix + first[:-1] + chr(ord(first[-1]) - 1)
        return wanted & {self._seen(meta)[len(prefix) :] for meta in self.objects.below(prefix, after=after)}

    def names(self, folder: Path) -> list[str]:
        """See `FileStore.names`."""
        files, folders = self.objects.directly_below(f"{self.key(folder)}/")
        found = [*(self._seen(meta).rpartition("/")[2] for meta in files), *folders]
        return [name for name in found if not name.startswith(".")]

    def folders(self, parent: Path) -> list[str]:
        """See `FileStore.folders`."""
        return sorted(name for name in self.objects.directly_below(f"{self.key(parent)}/")[1] if not name.startswith("."))

    def entries(self, folder: Path) -> list[Entry]:
        """See `FileStore.entries`."""
        prefix = f"{self.key(folder)}/"
        found: dict[str, tuple[bool, int, float]] = {}
        for meta in self.objects.below(prefix):
            name, inside, _ = meta.key[len(prefix) :].partition("/")
            _, size, touched = found.get(name, (False, 0, 0.0))
            found[name] = (bool(inside), size + meta.size, max(touched, meta.written_ns / 1e9))
        return [
            Entry(path=folder / name, is_folder=is_folder, size=lambda size=size: size, touched=lambda touched=touched: touched)
            for name, (is_folder, size, touched) in sorted(found.items())
        ]

    def open(self, path: Path) -> pa.NativeFile:
        """See `FileStore.open`."""
        return pa.memory_map(str(self.fetch(path)))

    def fetch(self, path: Path) -> Path:
        """See `FileStore.fetch`."""
        key = self.key(path)
        if path.suffix not in NEVER_CHANGE:
            return self._fetch_small(path, key)
        meta = self._known.get(key) or self.objects.head(key)
        if meta is None:
            raise FileNotFoundError(f"{path} is not in the bucket")
        self._known[key] = meta
        if not is_copy(path, meta):
            self._bring(path, meta)
        return path

    def _fetch_small(self, path: Path, key: str) -> Path:
        try:
            found = self.objects.read(key, unless=etag_of(path))
        except FileNotFoundError:
            if not _is_mirrored(path):
                path.unlink(missing_ok=True)
            raise
        if found is not None:
            content, meta = found
            make_directory(path.parent)
            temp = name_aside(path)
            try:
                temp.write_bytes(content)
                keep(temp, path, meta.etag, meta)
            finally:
                temp.unlink(missing_ok=True)
        return path

    def fetch_folder(self, folder: Path) -> Path:
        """See `FileStore.fetch_folder`."""
        prefix = f"{self.key(folder)}/"
        found = [(folder / self._seen(meta)[len(prefix) :], meta) for meta in self.objects.below(prefix)]
        published = [name for name in LAST if etag_of(folder / name)]
        if not found and published and self.objects.head(prefix + published[0]) is None:
            shutil.rmtree(folder)  # a copy of what another machine has removed
        wanted = [(path, meta) for path, meta in found if not is_copy(path, meta)]
        last = [each for each in wanted if each[0].name in LAST]
        _side_by_side(lambda each: self._bring(*each), [each for each in wanted if each not in last])
        for each in last:
            self._bring(*each)
        return folder

    def fetch_again(self, path: Path) -> bool:
        """See `FileStore.fetch_again`."""
        key = self.key(path)
        self._known.pop(key, None)
        if path.is_dir():
            before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
            for file in before:
                file.unlink(missing_ok=True)
            self.fetch_folder(path)
            return any(file.is_file() and file.read_bytes() != content for file, content in before.items())
        before = path.read_bytes() if path.is_file() else b""
        path.unlink(missing_ok=True)
        try:
            return self.fetch(path).read_bytes() != before
        except FileNotFoundError:
            return False

    def refresh(self, folder: Path, below: Collection[str] = ()) -> None:
        """See `FileStore.refresh`."""
        files, folders = self.objects.directly_below(f"{self.key(folder)}/")
        for name in folders:
            make_directory(folder / name)
        newer = []
        for meta in files:
            path = folder / meta.key.rpartition("/")[2]
            if not path.name.startswith(".") and path.suffix not in NEVER_CHANGE and not is_copy(path, meta):
                newer.append((path, meta))
        if newer:
            with not_mirrored(folder) as free:
                wanted = [each for each in newer if free or each[0].suffix not in GROW]
                _side_by_side(lambda each: self._bring(*each), wanted)
        there = {meta.key.rpartition("/")[2] for meta in files}
        if folder.is_dir():
            for path in folder.iterdir():  # copies of what another machine has removed
                if path.is_file() and path.name not in there and etag_of(path):
                    path.unlink(missing_ok=True)
        for name in below:
            if name in folders or (folder / name).is_dir():
                self.refresh(folder / name, below)

    def marks(self, path: Path | str) -> tuple[int, int] | None:
        """See `FileStore.marks`."""
        key = self.key(path)
        folder = key.rpartition("/")[0]
        if key not in self._known and folder not in self._listed:
            self._listed.add(folder)  # once: whoever asks for one file of a folder asks for many
            for found in self.objects.directly_below(f"{folder}/")[0]:
                self._seen(found)
        meta = self._known.get(key) or self.objects.head(key)
        if meta is None:
            return None
        self._known[key] = meta
        return meta.size, meta.written_ns

    def remove(self, path: Path) -> None:
        """See `FileStore.remove`."""
        self.objects.remove([self.key(path)])
        self._known.pop(self.key(path), None)
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        """See `FileStore.remove_folder`."""
        keys = [meta.key for meta in self.objects.below(f"{self.key(folder)}/")]
        # Its last file first: without it nobody takes the folder for a whole one.
        self.objects.remove(sorted(keys, key=lambda key: key.rpartition("/")[2] not in LAST))
        for key in keys:
            self._known.pop(key, None)
        shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, path: Path) -> Path:
        """See `FileStore.set_aside`."""
        aside = hidden_name(path)
        key, to = self.key(path), self.key(aside)
        inside = [meta.key for meta in self.objects.below(f"{key}/")]
        keys = sorted(inside, key=lambda each: each.rpartition("/")[2] not in LAST) or [key]
        for each in keys:
            with suppress(FileNotFoundError):
                self.objects.copy(each, to + each.removeprefix(key))
        self.objects.remove(keys)
        for each in keys:
            self._known.pop(each, None)
        with suppress(FileNotFoundError):
            os.rename(path, aside)
        return aside

    @contextmanager
    def held(self, lock: Path, wait_s: float = 0.0) -> Iterator[bool]:
        """See `FileStore.held`."""
        with POSIX.held(lock, wait_s) as mine_here:
            if not mine_here:
                yield False
                return
            folder = lock.parent
            lease = Lease.take(self.objects, self.key(lock), wait_s=wait_s, on_lost=lambda sentence: self._lose(folder, sentence))
            if lease is None:
                yield False
                return
            self._lost = [each for each in self._lost if each[0] != folder]
            try:
                yield True
            finally:
                lease.give_back()

    def is_held(self, lock: Path) -> bool:
        """See `FileStore.is_held`."""
        return POSIX.is_held(lock) or is_alive(self.objects, self.key(lock))

    def _lose(self, folder: Path, sentence: str) -> None:
        self._lost.append((folder, sentence))
        reporter().say(sentence)

    def _check_held(self, path: Path) -> None:
        """Write nothing more into a folder whose lock another process has taken over."""
        for folder, sentence in self._lost:
            if path.is_relative_to(folder):
                raise InputError(sentence)

    @contextmanager
    def mirror(self, folder: Path) -> Iterator[Hold]:
        """See `FileStore.mirror`."""
        with locked(folder):
            mirror = Mirror(self.objects, self.key(folder), folder)
            try:
                yield mirror
            finally:
                mirror.close()

    def check(self, folder: Path) -> None:
        """See `FileStore.check`."""
        key = f"{self.key(folder)}/.probe-{secrets.token_hex(6)}".lstrip("/")
        first, second = self.objects.create(key, b"1"), self.objects.create(key, b"2")
        stale = self.objects.update(key, b"3", '"0"')
        self.objects.remove([key])
        if first is None or second is not None or stale is not None:
            raise InputError(
                f"the object store of bucket '{self.objects.bucket}' ignores conditional puts (If-None-Match, If-Match), so two "
                "trainers could overwrite each other: use a store that has them"
            )

    def key(self, path: Path | str) -> str:
        """Key of the object that a path stands for."""
        return (self._prefix + str(path)[len(str(self._cache)) :]).lstrip("/")

    def _seen(self, meta: Meta) -> str:
        self._known[meta.key] = meta
        return meta.key

    def _bring(self, path: Path, meta: Meta) -> None:
        """Fetch an object into the cache.

        Raises:
            FileNotFoundError: it is gone.
        """
        make_directory(path.parent)
        temp = name_aside(path)
        try:
            for _ in range(8):
                with open(temp, "wb") as file:
                    try:
                        self.objects.read_into(meta, file.fileno())
                        break
                    except FileNotFoundError:
                        newer = self.objects.head(meta.key)
                        if newer is None or newer.etag == meta.etag:
                            raise
                        meta = newer  # replaced meanwhile
            self._known[meta.key] = meta
            keep(temp, path, meta.etag, meta)
        finally:
            temp.unlink(missing_ok=True)
        self._fetched += meta.size
        if self._fetched >= _TRIM_EVERY:
            self._fetched = 0
            trim(self._cache, float(os.environ.get(_CACHE_VARIABLE, _CACHE_GB)))


def _side_by_side(work: Callable[..., None], items: list) -> None:
    if len(items) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(items)), thread_name_prefix="objects") as pool:
        list(pool.map(work, items))


def _last_of(folder: Path) -> str:
    """Name of the file that makes a folder whole."""
    found = [name for name in LAST if (folder / name).is_file()]
    return found[0] if found else max(file.name for file in folder.iterdir() if file.is_file())


def _is_mirrored(path: Path) -> bool:
    with not_mirrored(path.parent) as free:
        return path.suffix in GROW and not free
