"""Requests to an object store: what is retried, for how long, and what an answer means.

Every request is retried here and nowhere else, so that a create whose answer was lost is known as such. It is *unknown* until it
was read back: each create and update carries a mark of its own in the object's metadata, and "already exists" is our own object
if it has that mark. Server errors, broken connections and cut bodies are waited out for `PATIENCE_S`; a sentence says so. A
refusal (no such bucket, a wrong key, a clock that is wrong) is an error at once, in one sentence.

This module knows keys and bytes. `storage/bucket.py` knows paths and folders.
"""

import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storage.object_errors import CutBodyError, endpoint, in_few_words, is_away, refusal
from telemetry.errors import InputError, StoreAwayError
from telemetry.progress import reporter

if TYPE_CHECKING:
    from obstore.store import S3Store

PATIENCE_S = 1200.0
"""Seconds for which a store that does not answer is waited for: longer than the ten minutes of a restart or a failover."""
FIRST_PATIENCE_S = 15.0
"""The same for a store that has never answered, where a wrong address is likelier than an outage."""
_SAY_AFTER_S = 5.0
_LONGEST_PAUSE_S = 10.0
_REQUEST_S = 60.0
"""Seconds after which one request counts as failed. The part of a large file takes a second on a slow line."""
_PART = 8 << 20
"""Bytes of one part of a large file; parts are read side by side."""
_MARK = "entente-mark"

Result = TypeVar("Result")
Content = bytes | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What the store says about one object."""

    key: str
    size: int
    """Bytes."""
    written_ns: int
    """Time of its last write by the store's clock, Unix nanoseconds; most stores count whole seconds."""
    etag: str
    """Differs between two versions of an object with different content."""


class Objects:
    """The objects of one bucket. Any thread may call; keys are relative to the bucket."""

    def __init__(self, bucket: str, *, answered: bool = False) -> None:
        """Credentials and endpoint come from the AWS_* environment variables; nothing is asked yet.

        Args:
            answered: the store has answered before, to the process that started this one.
        """
        self.bucket = bucket
        self.patience_s = PATIENCE_S
        self._gave_up = False  # once it was waited for in vain, whatever closes the run does not wait as long again
        self._answered = answered

    @cached_property
    def _store(self) -> "S3Store":
        return _from_environment(self.bucket)

    def create(self, key: str, content: Content) -> str | None:
        """Write an object if its key is free.

        Returns:
            its etag; None if another call has written an object of this key.
        """
        return self._conditional(key, content, "create")

    def update(self, key: str, content: bytes, etag: str) -> str | None:
        """Replace an object if it still has this etag. Returns the new etag; None if another writer was first."""
        return self._conditional(key, content, {"e_tag": etag})

    def overwrite(self, key: str, content: Content) -> str:
        """Write an object, whatever has the key; returns its etag. Repeated, it gives the same object."""
        import obstore

        return self._patiently(f"write {key}", lambda: obstore.put(self._store, key, content))["e_tag"] or ""

    def head(self, key: str) -> Meta | None:
        """What the store says about an object; None if there is none."""
        import obstore

        try:
            return _meta(self._patiently(f"look at {key}", lambda: obstore.head(self._store, key)))
        except FileNotFoundError:
            return None

    def read(self, key: str, *, unless: str = "") -> tuple[bytes, Meta] | None:
        """The whole content of a small object, or None if its etag still is `unless`.

        Raises:
            FileNotFoundError: there is no such object.
        """
        import obstore
        from obstore.exceptions import NotModifiedError

        def attempt() -> tuple[bytes, Meta]:
            answer = obstore.get(self._store, key, options={"if_none_match": unless} if unless else None)
            return _whole(answer.bytes().to_bytes(), answer.meta["size"], key), _meta(answer.meta)

        try:
            return self._patiently(f"read {key}", attempt)
        except NotModifiedError:
            return None

    def read_into(self, found: Meta, file: int) -> None:
        """Write the content of an object into the open file `file`, large ones in parts that are read side by side.

        Raises:
            FileNotFoundError: it is gone, or was replaced meanwhile.
        """
        import obstore
        from obstore.exceptions import PreconditionError

        def part(first: int) -> None:
            after = min(first + _PART, found.size)

            def attempt() -> bytes:
                answer = obstore.get(self._store, found.key, options={"range": (first, after), "if_match": found.etag})
                return _whole(answer.bytes().to_bytes(), after - first, found.key)

            os.pwrite(file, self._patiently(f"read {found.key}", attempt), first)

        try:
            if found.size <= _PART:
                if found.size:
                    part(0)
                return
            with ThreadPoolExecutor(8, thread_name_prefix="parts") as pool:
                list(pool.map(part, range(0, found.size, _PART)))
        except PreconditionError as error:
            raise FileNotFoundError(f"{found.key} was replaced while it was read") from error

    def below(self, prefix: str, *, after: str = "") -> Iterator[Meta]:
        """All objects whose key begins with `prefix`, by key; with `after` only those with a greater key."""
        import obstore

        def attempt() -> Sequence[Any]:
            return obstore.list(self._store, prefix, offset=after or None).collect()

        return map(_meta, self._patiently(f"list {prefix}", attempt))

    def directly_below(self, prefix: str) -> tuple[list[Meta], list[str]]:
        """The objects, and the names of the folders, directly below a prefix that ends in '/' or is empty."""
        import obstore

        found = self._patiently(f"list {prefix}", lambda: obstore.list_with_delimiter(self._store, prefix))
        names = [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]
        return [_meta(each) for each in found["objects"] if each["path"] != prefix.rstrip("/")], names

    def copy(self, key: str, to: str) -> None:
        """Copy an object inside the store.

        Raises:
            FileNotFoundError: there is no such object.
        """
        import obstore

        self._patiently(f"copy {key}", lambda: obstore.copy(self._store, key, to))

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects; those that do not exist count as removed."""
        import obstore

        for key in keys:
            self._patiently(f"remove {key}", lambda key=key: obstore.delete(self._store, key))

    def _conditional(self, key: str, content: Content, mode: Any) -> str | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mark, unknown = secrets.token_hex(8), False

        def attempt() -> str | None:
            nonlocal unknown
            try:
                put = obstore.put(self._store, key, content, mode=mode, use_multipart=False, attributes={_MARK: mark})
                return put["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                return None
            except Exception:
                unknown = True  # it may have been done
                raise

        try:
            etag = self._patiently(f"write {key}", attempt)
        except FileNotFoundError:
            if mode == "create":
                raise
            return None  # the object that was to be updated is gone
        return self._own(key, mark) if etag is None and unknown else etag

    def _own(self, key: str, mark: str) -> str | None:
        """The etag of the object if it has this mark."""
        import obstore

        def attempt() -> tuple[str | None, str]:
            answer = obstore.get(self._store, key, options={"head": True})
            return answer.attributes.get(_MARK), answer.meta["e_tag"] or ""

        try:
            found, etag = self._patiently(f"look at {key}", attempt)
        except FileNotFoundError:
            return None
        return etag if found == mark else None

    def _patiently(self, doing: str, call: Callable[[], Result]) -> Result:
        """Call, and call again while the store is away.

        Raises:
            InputError: the store refuses the request, or has never answered.
            StoreAwayError: it did not answer for `patience_s`.
            FileNotFoundError, and obstore's errors of conditional requests: as `call`.
        """
        began, pause, said = time.monotonic(), 0.1, False
        while True:
            try:
                result = call()
            except Exception as error:
                if not is_away(error):
                    raise refusal(self.bucket, error) or error from None
                waited = time.monotonic() - began
                limit = self.patience_s if self._answered and not self._gave_up else FIRST_PATIENCE_S
                if waited >= limit:
                    if not self._answered:
                        raise InputError(
                            f"{endpoint()} cannot be used for bucket '{self.bucket}' ({in_few_words(error)}): start it, or "
                            "correct AWS_ENDPOINT_URL"
                        ) from error
                    self._gave_up = True
                    raise StoreAwayError(
                        f"the object store of bucket '{self.bucket}' did not {doing} for {waited:.0f} s ({in_few_words(error)}): "
                        "see whether it runs, then continue; nothing that was stored is lost"
                    ) from error
                if waited >= _SAY_AFTER_S and not said:
                    said = True
                    reporter().say(
                        f"the object store of bucket '{self.bucket}' is away ({in_few_words(error)}); waiting for it, at most "
                        f"{limit:.0f} s"
                    )
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            self._answered, self._gave_up = True, False
            if said:
                reporter().say(f"the object store of bucket '{self.bucket}' is back after {time.monotonic() - began:.0f} s")
            return result


def _from_environment(bucket: str) -> "S3Store":
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return S3Store(
        bucket,
        region=region,
        config={"endpoint": endpoint} if endpoint else None,
        client_options={
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "timeout": timedelta(seconds=_REQUEST_S),
            "connect_timeout": timedelta(seconds=5),
        },
        retry_config={
            "max_retries": 0,
            "retry_timeout": timedelta(seconds=1),
            "backoff": {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    )


def _meta(found: Any) -> Meta:
    return Meta(
        key=found["path"],
        size=found["size"],
        written_ns=round(found["last_modified"].timestamp() * 1e6) * 1000,
        etag=found["e_tag"] or "",
    )


def _whole(content: bytes, size: int, key: str) -> bytes:
    if len(content) != size:
        raise CutBodyError(f"{key} came with {len(content)} of {size} bytes")
    return content
