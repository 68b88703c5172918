"""Identity of a base model: a hash over config, tokenizer, chat template and all weights.

An adapter on the wrong base of the same shape plays at random without an error. Hashing takes seconds for a few gigabytes, so a
cache file keeps the hashes, keyed by device, inode, size and times of each model file.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from entente.decoding.model_files import chat_template, end_token_ids, read_tokenizer_config
from entente.decoding.weight_files import weight_files
from entente.telemetry.machine import usable_cores

_SETTLED_S = 2.0
"""A file that changed less than this ago may change again within one tick of its times, so its hash is not cached."""
_MOST_REMEMBERED = 4096
_TEXTS = ("config.json", "tokenizer.json")
FORM = ("end tokens", "tokenizer_config.json")
"""What `form_hashes` has beyond `base_hashes`."""


def file_hash(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def base_identity(folder: Path, memory: Path | None = None) -> str:
    """Hash of `base_hashes`, 16 hex digits."""
    return identity_of(base_hashes(folder, memory))


def identity_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def base_hashes(folder: Path, memory: Path | None = None) -> dict[str, str]:
    """SHA-256 by name, of config, tokenizer, weights and "chat template". `memory`: cache file; None: hash every file."""
    files = [*(folder / name for name in _TEXTS), *weight_files(folder)]
    hashes = {file.name: content for file, content in zip(files, _hashes(files, memory), strict=True)}
    if template := chat_template(folder):
        hashes["chat template"] = hashlib.sha256(template.encode()).hexdigest()
    return hashes


def form_hashes(folder: Path, memory: Path | None = None) -> dict[str, str]:
    """`base_hashes`, and of what else changes the tokens of prompts and answers: the end tokens, most of which
    generation_config.json names, and tokenizer_config.json without its template. Not part of `base_identity`, because each
    release of transformers writes the latter differently."""
    tokenizer = {name: value for name, value in read_tokenizer_config(folder).items() if name != "chat_template"}
    contents = (json.dumps(content, sort_keys=True).encode() for content in (end_token_ids(folder), tokenizer))
    form = (hashlib.sha256(content).hexdigest() for content in contents)
    return base_hashes(folder, memory) | dict(zip(FORM, form, strict=True))


def weights_hash(folder: Path, memory: Path | None = None) -> str:
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
    status = file.stat()
    return max(status.st_mtime, status.st_ctime)


def _mark(file: Path) -> str:
    status = file.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _remembered(memory: Path) -> dict[str, str]:
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
    except OSError:  # on a full disk or without permission, the next call hashes the model files again
        with contextlib.suppress(OSError):
            aside.unlink()
