"""Tells base models apart by all that decides what they draw: config, tokenizer, chat template, and every byte of their weights.

Two models of one shape may differ in any layer, and an adapter drawn on the wrong one plays by chance, without an error. Hashing
takes seconds for a few gigabytes, so hashes are remembered in a file, by what the kernel says of each model file: with the same
device, inode, size and times it has the same content.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from entente.decoding.model_files import chat_template
from entente.decoding.weight_files import weight_files
from entente.telemetry.machine import usable_cores

_SETTLED_S = 2.0
"""A file that changed less than this ago may change again within one tick of its times, so its hash is not remembered."""
_MOST_REMEMBERED = 4096
"""Files, the newest ones: those of some thousand models."""
_TEXTS = ("config.json", "tokenizer.json")


def file_hash(file: Path) -> str:
    """SHA-256 of the content of a file, 64 hex digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def base_identity(folder: Path, memory: Path | None = None) -> str:
    """Hash that is equal for the same model alone, 16 hex digits.

    Args:
        memory: see `base_hashes`.
    """
    return identity_of(base_hashes(folder, memory))


def identity_of(hashes: dict[str, str]) -> str:
    """The identity of a model with these hashes."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def base_hashes(folder: Path, memory: Path | None = None) -> dict[str, str]:
    """What makes a model this one -> its SHA-256: names of config, tokenizer and weight files, and its chat template.

    Args:
        memory: JSON file with hashes of earlier calls, which gets those of this one; None: read every file.
    """
    files = [*(folder / name for name in _TEXTS), *weight_files(folder)]
    hashes = {file.name: content for file, content in zip(files, _hashes(files, memory), strict=True)}
    if template := chat_template(folder):
        hashes["chat template"] = hashlib.sha256(template.encode()).hexdigest()
    return hashes


def weights_hash(folder: Path, memory: Path | None = None) -> str:
    """SHA-256 of the content of all weight files, 64 hex digits."""
    return hashlib.sha256(bytes.fromhex("".join(_hashes(weight_files(folder), memory)))).hexdigest()


def _hashes(files: Sequence[Path], memory: Path | None) -> list[str]:
    known = {} if memory is None else _remembered(memory)
    marks = [_mark(file) for file in files]
    unread = {file: mark for file, mark in zip(files, marks, strict=True) if mark not in known}
    settled = time.time() - _SETTLED_S
    with ThreadPoolExecutor(usable_cores()) as threads:  # hashlib lets other threads run
        read = dict(zip(unread.values(), threads.map(file_hash, unread), strict=True))
    if memory is not None and (
        learned := {mark: read[mark] for file, mark in unread.items() if _mark(file) == mark and _changed(file) < settled}
    ):
        _remember(memory, known | learned)
    return [(known | read)[mark] for mark in marks]


def _changed(file: Path) -> float:
    """Unix time of the last change, seconds."""
    found = file.stat()
    return max(found.st_mtime, found.st_ctime)


def _mark(file: Path) -> str:
    """What changes when the content of a file does."""
    found = file.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _remembered(memory: Path) -> dict[str, str]:
    """The remembered hashes; none if the file cannot be read, so that all model files are."""
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, hashes: dict[str, str]) -> None:
    newest = dict(list(hashes.items())[-_MOST_REMEMBERED:])
    aside = memory.with_name(f".{memory.name}.{os.getpid()}.tmp")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(newest, indent=1))
        aside.replace(memory)
    except OSError:  # on a full disk or in a folder of somebody else, the model files are only read again next time
        with contextlib.suppress(OSError):
            aside.unlink()
