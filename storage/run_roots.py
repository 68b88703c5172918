"""Folders of runs: a local path, or `s3://bucket/prefix`, which is mounted as a local folder.

A mounted folder is a *cache* of its bucket: code uses paths in it, and `storage/bucket.py` moves the content. The cache lies in
`~/.cache/entente`, or where `ENTENTE_CACHE` says, in one folder for each endpoint, bucket and prefix. Processes that this one
starts inherit its mounts by an environment variable. Endpoint and keys come from the AWS_* variables and are never stored.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from storage.files import FILES, make_directory
from telemetry.errors import InputError

INHERITED = "ENTENTE_MOUNTS"
"""Environment variable with the mounts of the parent process: JSON, local folder -> URL."""
_CACHE = "ENTENTE_CACHE"
_URL = re.compile(r"s3:/{1,3}(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(?:/[^/]+)*)/*")
_OTHER_STORES = re.compile(r"[a-z][a-z0-9+.-]*://|s3:/")


def located(root: str | Path) -> Path:
    """The local folder of a folder of runs. `s3://bucket/prefix` is mounted; nothing is asked of the store.

    A URL that went through `Path`, which leaves one slash, is taken too.

    Raises:
        InputError: it is a URL that names no bucket of an S3 store.
    """
    text = str(root)
    if not _OTHER_STORES.match(text):
        return Path(root)
    match = _URL.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' names no folder of runs: give a folder, or s3://bucket/prefix")
    bucket, prefix = match["bucket"], match["prefix"].strip("/")
    url = f"s3://{bucket}/{prefix}".rstrip("/")
    cache = _cache_folder(url)
    if str(cache) not in _mounts():
        make_directory(cache)
        _mount(cache, url)
        os.environ[INHERITED] = json.dumps(_mounts() | {str(cache): url})
    return cache


def as_given(path: str | Path) -> str:
    """A path as the user knows it: one in a mounted folder as a URL."""
    return text_as_given(str(path))


def text_as_given(text: str) -> str:
    """A text in which every mounted folder is replaced by its URL."""
    for cache, url in _mounts().items():
        text = text.replace(cache, url)
    return text


def mount_inherited() -> None:
    """Mount what the parent process had mounted."""
    for cache, url in _mounts().items():
        _mount(Path(cache), url, answered=True)


def _mount(cache: Path, url: str, *, answered: bool = False) -> None:
    from storage.bucket import BucketFiles
    from storage.objects import Objects

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    FILES.mount(cache, BucketFiles(Objects(bucket, answered=answered), prefix, cache))


def _mounts() -> dict[str, str]:
    return json.loads(os.environ.get(INHERITED, "{}"))


def _cache_folder(url: str) -> Path:
    home = os.environ.get(_CACHE)
    parent = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "entente"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    digest = hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()[:8]
    name = re.sub(r"[^a-z0-9.-]+", "-", url.removeprefix("s3://").lower())[:60]
    return (parent / "buckets" / f"{name}-{digest}").resolve()


def _validated(root: Any) -> Any:
    try:
        return located(root) if isinstance(root, str | Path) else root
    except InputError as error:
        raise ValueError(str(error)) from error


RunsFolder = Annotated[Path, BeforeValidator(_validated), PlainSerializer(as_given, return_type=str, when_used="json")]
"""Type of a setting or flow parameter that names a folder of runs; JSON has the URL, so it is valid on every machine."""
