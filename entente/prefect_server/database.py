"""Checks Prefect's SQLite database: can the installed Prefect open it, and does its disk have free space. Read-only, by file,
because a server that cannot open or write its database answers late and without the reason."""

import os
import re
import shutil
import sqlite3
import tempfile
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

from entente.prefect_server.environment import LOOPBACK
from entente.telemetry.errors import DiskFullError, InputError, disk_full

_URLS = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
_NO_FILE = (*_URLS, "PREFECT_SERVER_DATABASE_DRIVER", "PREFECT_SERVER_DATABASE_HOST")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_SCARCE = 2**26
"""Free bytes below which a test write decides: the figure excludes the reserve of the system."""
_TRIED = 2**18


def database_file() -> Path | None:
    """The database of a server that commands start here; None if the user has configured another."""
    url = next((value for name in _URLS if (value := os.environ.get(name))), "")
    if url.startswith("sqlite") and ":///" in url and ":memory:" not in url:
        return Path(url.partition(":///")[2].partition("?")[0])
    if any(os.environ.get(name) for name in _NO_FILE):
        return None
    return Path(os.environ.get("PREFECT_HOME") or ".prefect") / "prefect.db"


def check_database() -> None:
    """Raise InputError if the database is damaged, or a newer release of Prefect wrote it."""
    file = database_file()
    if file is None or not file.is_file():
        return
    verdict, revisions = _examine(file)
    aside = f"or move it away with `mv '{file}' '{file}.old'`: Prefect makes a new one, and all runs are in their own folders"
    if verdict != "ok":
        raise InputError(f"Prefect's database '{file}' is damaged ({' '.join(verdict.split())}): restore a copy, {aside}")
    for revision in revisions:
        if not _is_known(revision):
            raise InputError(
                f"Prefect's database '{file}' is of a newer release than the installed {metadata.version('prefect')} "
                f"(revision {revision}): install that release, {aside}"
            )


def _examine(file: Path) -> tuple[str, list[str]]:
    """("ok" or what is damaged, revisions of the tables; none before they are created)."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            tables = database.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = database.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname.startswith(_DAMAGED):
            return str(error), []
        if isinstance(error, sqlite3.OperationalError):  # busy or unreadable: the start of the server reports which
            return "ok", []
        raise
    return verdict, [revision for (revision,) in rows]


def check_room() -> None:
    """Raise DiskFullError if the server in use is on this machine and the disk of its database is full."""
    file, address = database_file(), os.environ.get("PREFECT_API_URL")
    if address and urlsplit(address).hostname not in LOOPBACK:
        return
    if file is None or not file.is_file() or shutil.disk_usage(file.parent).free > _SCARCE:
        return
    try:
        with tempfile.TemporaryFile(dir=file.parent, buffering=0) as tried:
            tried.write(bytes(_TRIED))
    except OSError as error:
        if disk_full(error) is not None:
            raise DiskFullError(f"no space is left on the disk of Prefect's database '{file}': make room") from error
        raise


def _is_known(revision: str) -> bool:
    """True if the installed Prefect has the migration of this revision, or keeps its migrations elsewhere."""
    package = find_spec("prefect")
    folders = package.submodule_search_locations if package else None
    files = [*Path((folders or [""])[0]).glob("server/database/_migrations/versions/sqlite/*.py")]
    made = re.compile(rf"^revision\b.*[\"']{re.escape(revision)}[\"']", re.MULTILINE)
    return not files or any(made.search(each.read_text(encoding="utf-8")) for each in files)
